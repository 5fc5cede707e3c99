-- Take one message from the first of several Dramatiq queues that has one (in Dramatiq's database).
-- now, broker id, heartbeats key, ttl_ms of its books, then for each queue: list key, messages key, acks key
-- Replies { position of the queue from 0, message id, message }, or nil.
redis.call('ZADD', ARGV[3], int(now), ARGV[2])
redis.call('PEXPIRE', ARGV[3], ARGV[4])
for n = 5, #ARGV, 3 do
  local id = redis.call('LPOP', ARGV[n])
  while id do
    local message = redis.call('HGET', ARGV[n + 1], id)
    if message then
      redis.call('SADD', ARGV[n + 2], id)
      redis.call('PEXPIRE', ARGV[n + 2], ARGV[4])
      return { (n - 5) / 3, id, message }
    end
    id = redis.call('LPOP', ARGV[n]) -- the one before was acknowledged or purged
  end
end
return nil
