-- now, id, attempt, first_index, packed tokens, cached tokens, end state ('' = goes on), end reason, terminal entry,
-- active_ttl_ms, stream_ttl_ms
local id, attempt, first_index, tokens, cached = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local end_state, end_reason, terminal, active_ttl, stream_ttl = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local req, out = REQUEST:format(id), OUT:format(id)

local r = record(id)
if not r then
  return { 'missing' }
end
if int(r.attempt) ~= attempt then
  return { 'stale' }
end
if is_over(r) then
  -- A re-send after a lost reply ends where its first sending ended; anything else came too late.
  if end_state ~= '' and redis.call('HGET', req, 'ended_by') == attempt then
    return { 'ok', int(r.next_index) }
  end
  return { 'closed' }
end
if not is_held(r) then
  return { 'stale' }
end
if first_index > r.next_index then
  return { 'gap' }
end

tokens = string.sub(tokens, (r.next_index - first_index) * 4 + 1)
if #tokens > 0 then
  redis.call('XADD', out, int(r.next_index + 1) .. '-' .. attempt, 't', tokens)
  if r.next_index == 0 then
    redis.call('PEXPIRE', out, active_ttl)
    redis.call('HSET', req, 'first_token_ms', int(now))
    event('first_token', id, attempt, r.worker, r.model, details({ cached = tonumber(cached) }))
  end
  r.next_index = r.next_index + #tokens / 4
  redis.call('HSET', req, 'state', 'streaming', 'next_index', int(r.next_index), 'losses', '0', 'cached', cached)
  r.cached = cached
end
if end_state ~= '' then
  finish(r, end_state, end_reason, terminal, attempt, stream_ttl)
end
return { 'ok', int(r.next_index) }
