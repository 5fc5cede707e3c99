-- now, worker, model
local worker, model = ARGV[2], ARGV[3]
redis.call('DEL', WORKER:format(worker))
if redis.call('ZREM', WORKERS:format(model), worker) == 1 then
  event('worker_left', '', '', worker, model, details({ held = redis.call('SCARD', HELD:format(worker)) }))
end
return 1
