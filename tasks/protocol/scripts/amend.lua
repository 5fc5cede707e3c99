-- now, id of a first choice, its new answer. Replies 0 if there is no such record (any more).
local req = REQUEST:format(ARGV[2])
if redis.call('HEXISTS', req, 'answer') == 0 then
  return 0
end
redis.call('HSET', req, 'answer', ARGV[3])
return 1
