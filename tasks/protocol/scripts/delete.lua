-- Take an answer that is over away: records and streams of all choices, and its place in the index.
-- now, id of the first choice, index, deleted_ms. Replies 'deleted', 'open' (it is not over) or 'unknown'.
local id, index = ARGV[2], ARGV[3]
local flat = redis.call('HMGET', REQUEST:format(id), 'choices', 'submitted_ms')
if not flat[1] then
  return redis.call('EXISTS', DELETED:format(id)) == 1 and 'deleted' or 'unknown'
end
for choice in flat[1]:gmatch('%S+') do
  local r = record(choice)
  if r and not is_over(r) then
    return 'open'
  end
end
for choice in flat[1]:gmatch('%S+') do
  redis.call('DEL', REQUEST:format(choice), OUT:format(choice))
end
redis.call('ZREM', index, id)
redis.call('SET', DELETED:format(id), flat[2] or int(now), 'PX', ARGV[4])
return 'deleted'
