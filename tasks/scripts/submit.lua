-- now, id, model, job, nonce, reader ('' = nobody's), max_waiting, offer_deadline_ms, active_ttl_ms, prompt tokens
local id, model, job, nonce, reader = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local max_waiting, offer_deadline, active_ttl = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local req, waiting = REQUEST:format(id), WAITING:format(model)

local known = redis.call('HMGET', req, 'attempt', 'nonce')
if known[1] then
  return { 'ok', known[1], known[2] == nonce and 1 or 0 }
end
if redis.call('ZCOUNT', WORKERS:format(model), '(' .. int(now), '+inf') == 0 then
  return { 'no_worker' }
end
redis.call('ZREMRANGEBYSCORE', waiting, '-inf', int(now - active_ttl))
local num_waiting = redis.call('ZCARD', waiting)
if num_waiting >= max_waiting then
  return { 'full', int(num_waiting) }
end

redis.call('HSET', req, 'state', 'offered', 'attempt', '1', 'model', model, 'job', job, 'nonce', nonce,
  'reader', reader, 'worker', '', 'next_index', '0', 'fingerprint', '', 'losses', '0', 'cached', '0',
  'queue', QUEUE_NEW:format(model), 'submitted_ms', int(now), 'offered_ms', int(now), 'waiting_ms', int(now))
redis.call('PEXPIRE', req, active_ttl)
redis.call('ZADD', waiting, int(now), id)
redis.call('PEXPIRE', waiting, active_ttl)
redis.call('ZADD', DUE, int(now + offer_deadline), id)
if reader ~= '' then
  redis.call('SADD', READER_OPEN:format(reader), id)
  redis.call('PEXPIRE', READER_OPEN:format(reader), active_ttl)
end
event('submitted', id, '1', '', model, details({ prompt_tokens = tonumber(ARGV[10]) }))
return { 'ok', '1', 1 }
