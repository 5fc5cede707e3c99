-- Take one message out of several Dramatiq queues (in Dramatiq's database), and acknowledge earlier ones.
-- now, broker id, heartbeats key, ttl_ms of its books, numbers of the main and of Dramatiq's database, then for each
-- queue: list key, messages key, acks key, wake key, by how many ms later its messages count as offered ('' = before all
-- queues after it), ids of the messages that are acknowledged (separated by spaces).
-- Replies { position of the queue from 0, message id, message, 1 if there is more to take }, or nil.
-- `tasks.priorities` has the rule.
local FIRST, NUM = 6, 6
redis.call('ZADD', ARGV[3], int(now), ARGV[2])
redis.call('PEXPIRE', ARGV[3], ARGV[4])
for n = FIRST, #ARGV, NUM do
  for id in ARGV[n + 5]:gmatch('%S+') do
    if redis.call('SREM', ARGV[n + 2], id) == 1 then
      redis.call('HDEL', ARGV[n + 1], id)
    end
  end
end

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
  return time + tonumber(ARGV[found.n + 4])
end

local best, best_ms
for n = FIRST, #ARGV, NUM do
  local found = oldest(n)
  if found and ARGV[n + 4] == '' then
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
if best then
  redis.call('LPOP', ARGV[best.n])
  redis.call('SADD', ARGV[best.n + 2], best.id)
  redis.call('PEXPIRE', ARGV[best.n + 2], ARGV[4])
end
local wakes = {}
for n = FIRST, #ARGV, NUM do
  if redis.call('LLEN', ARGV[n]) > 0 then
    return { (best.n - FIRST) / NUM, best.id, best.message, 1 }
  end
  wakes[#wakes + 1] = ARGV[n + 3]
end
-- The wake tokens that are left would only have somebody look for messages that were taken without one.
local here, there = ARGV[5]:match('(%d+) (%d+)')
redis.call('SELECT', here)
redis.call('DEL', unpack(wakes))
redis.call('SELECT', there)
return best and { (best.n - FIRST) / NUM, best.id, best.message, 0 } or nil
