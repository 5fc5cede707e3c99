-- now, id, attempt, worker, fingerprint, claim id (the same again when re-sent), lease_check_ms, active_ttl_ms
local id, attempt, worker, fingerprint, claim_id = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local lease_check, active_ttl = tonumber(ARGV[7]), ARGV[8]
-- Until the next heartbeat of a worker that was believed dead: as long as the usual lease.
local CLAIM_LEASE_MS = 500
local req = REQUEST:format(id)

local r = record(id)
if not r then
  return { 'stale', 'unknown' }
end
if int(r.attempt) ~= attempt then
  return { 'stale', 'attempt ' .. int(r.attempt) .. ' is the active one' }
end
local again = is_held(r) and redis.call('HGET', req, 'claim_id') == claim_id
if r.state ~= 'offered' and not again then
  return { 'stale', r.state }
end
if r.next_index > 0 and r.fingerprint ~= fingerprint then
  return { 'mismatch', r.fingerprint }
end

if not again then
  redis.call('HSET', req, 'state', 'claimed', 'worker', worker, 'claim_id', claim_id, 'fingerprint', fingerprint,
    'claimed_ms', int(now))
  redis.call('ZREM', WAITING:format(r.model, r.class), id)
  redis.call('SADD', HELD:format(worker), id)
  redis.call('PEXPIRE', HELD:format(worker), active_ttl)
  -- Whoever holds is watched, also after it was believed dead and forgotten.
  redis.call('ZADD', WORKERS:format(r.model), 'NX', int(now + CLAIM_LEASE_MS), worker)
  look_at(r, now + lease_check)
  local claims = CLAIMS:format(r.model, int(math.floor(now / CLAIMS_BUCKET_MS)))
  redis.call('INCR', claims)
  redis.call('PEXPIRE', claims, 60000)
  local mark = CLAIMED_UNTIL:format(r.queue)
  if r.offered_ms > (tonumber(redis.call('GET', mark)) or 0) then
    redis.call('SET', mark, int(r.offered_ms), 'PX', active_ttl)
  end
  event('claimed', id, attempt, worker, r.model, details({
    next_index = r.next_index, waited_ms = now - r.offered_ms, fingerprint = fingerprint }))
end

local tokens = {}
for _, entry in ipairs(redis.call('XRANGE', OUT:format(id), '-', '+')) do
  if entry[2][1] == 't' then
    tokens[#tokens + 1] = entry[2][2]
  end
end
return { 'ok', redis.call('HGET', req, 'job'), table.concat(tokens) }
