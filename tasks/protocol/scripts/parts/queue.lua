-- Dramatiq's queues.

-- Put a message into one of Dramatiq's queues and wake a consumer for each of `num_tokens`. `place`: the numbers of
-- this database and of Dramatiq's, separated by a space.
local function enqueue(place, queue, message_id, message, num_tokens)
  local here, there = place:match('(%d+) (%d+)')
  local wake = WAKE:format(queue)
  for _ = 1, num_tokens do
    redis.call('LPUSH', wake, '1')
  end
  redis.call('LTRIM', wake, 0, MAX_WAKE_TOKENS - 1)
  redis.call('PEXPIRE', wake, WAKE_TTL_MS)
  redis.call('SELECT', there)
  redis.call('HSET', MESSAGES:format(queue), message_id, message)
  redis.call('RPUSH', MESSAGE_LIST:format(queue), message_id)
  redis.call('SELECT', here)
end
