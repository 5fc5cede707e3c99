-- now, worker, model, by the watchdog (1) or by itself (0). Replies 1 if the worker is forgotten.
-- What it still holds is never forgotten with it: its lease is over now, and the watchdog comes (again).
local worker, model, by_watchdog = ARGV[2], ARGV[3], ARGV[4] == '1'
local held, live = HELD:format(worker), WORKERS:format(model)
if by_watchdog and is_live(model, worker) then
  return 0
end
local lapsed = tonumber(redis.call('ZSCORE', live, worker) or nil)
if by_watchdog and lapsed and lapsed > 0 then
  redis.call('SET', LATELY:format(model), int(lapsed), 'PX', LATELY_MS)
end
for _, id in ipairs(redis.call('SMEMBERS', held)) do
  local r = record(id)
  if not r or not is_held(r) or r.worker ~= worker then
    redis.call('SREM', held, id)
  end
end
if redis.call('EXISTS', held) == 1 then
  redis.call('ZADD', live, 0, worker)
  return 0
end
redis.call('DEL', WORKER:format(worker), STEPS:format(worker), WORKER_REV:format(worker))
if redis.call('ZREM', live, worker) == 1 then
  event('worker_left', '', '', worker, model, '{}')
end
return 1
