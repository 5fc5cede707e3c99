-- now, worker, model: the smallest number of requests that another live worker with a free slot holds, -1 if none.
local least = -1
for _, peer in ipairs(redis.call('ZRANGEBYSCORE', WORKERS:format(ARGV[3]), '(' .. int(now), '+inf')) do
  if peer ~= ARGV[2] then
    local num_held = redis.call('SCARD', HELD:format(peer))
    local slots = tonumber(redis.call('HGET', WORKER:format(peer), 'slots')) or 0
    if num_held < slots and (least < 0 or num_held < least) then
      least = num_held
    end
  end
end
return least
