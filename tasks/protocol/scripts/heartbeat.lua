-- now, worker, model, info, load, slots, lease_ms
local worker, model, lease = ARGV[2], ARGV[3], tonumber(ARGV[7])
local key, live = WORKER:format(worker), WORKERS:format(model)
local is_known = redis.call('HSET', key, 'info', ARGV[4], 'load', ARGV[5], 'slots', ARGV[6]) == 0
redis.call('PEXPIRE', key, int(lease + 60000))
if redis.call('ZADD', live, int(now + lease), worker) == 1 or not is_known then
  event('worker_joined', '', '', worker, model, ARGV[4])
end
redis.call('PEXPIRE', live, 86400000)
redis.call('SADD', MODELS, model)
redis.call('PEXPIRE', MODELS, 604800000)
return redis.call('ZCOUNT', live, '(' .. int(now), '+inf')
