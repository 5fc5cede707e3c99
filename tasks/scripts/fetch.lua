-- Take one message out of several Dramatiq queues (in Dramatiq's database).
-- now, broker id, heartbeats key, ttl_ms of its books, then for each queue: list key, messages key, acks key, and by
-- how many ms later its messages count as offered ('' = before all queues after it).
-- Replies { position of the queue from 0, message id, message, 1 if there is more to take }, or nil.
-- `tasks.priorities` has the rule.
redis.call('ZADD', ARGV[3], int(now), ARGV[2])
redis.call('PEXPIRE', ARGV[3], ARGV[4])

-- The oldest message of the queue at ARGV[n] that was neither acknowledged nor purged.
local function oldest(n)
  local id = redis.call('LINDEX', ARGV[n], 0)
  while id do
    local message = redis.call('HGET', ARGV[n + 1], id)
    if message then
      return { n = n, id = id, message = message }
    end
    redis.call('LPOP', ARGV[n])
    id = redis.call('LINDEX', ARGV[n], 0)
  end
  return nil
end

local function counts_as_offered_ms(found)
  local is_json, fields = pcall(cjson.decode, found.message)
  local time = is_json and type(fields) == 'table' and tonumber(fields.message_timestamp) or 0
  return time + tonumber(ARGV[found.n + 3])
end

local best, best_ms
for n = 5, #ARGV, 4 do
  local found = oldest(n)
  if found and ARGV[n + 3] == '' then
    best = found
    break
  end
  if found and best then
    best_ms = best_ms or counts_as_offered_ms(best)
    local found_ms = counts_as_offered_ms(found)
    if found_ms < best_ms then
      best, best_ms = found, found_ms
    end
  elseif found then
    best = found
  end
end
if not best then
  return nil
end
redis.call('LPOP', ARGV[best.n])
redis.call('SADD', ARGV[best.n + 2], best.id)
redis.call('PEXPIRE', ARGV[best.n + 2], ARGV[4])
local num_left = 0
for n = 5, #ARGV, 4 do
  num_left = num_left + redis.call('LLEN', ARGV[n])
end
return { (best.n - 5) / 4, best.id, best.message, num_left > 0 and 1 or 0 }
