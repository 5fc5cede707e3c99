-- The tokens of one engine step: as many assignments as there are groups of arguments, one reply for each.
-- now, active_ttl_ms, stream_ttl_ms, then for each: id, attempt, first_index, packed tokens, cached tokens,
-- end state ('' = goes on), end reason, terminal entry, packed log probabilities ('' = none)
local active_ttl, stream_ttl = ARGV[2], ARGV[3]

local function append(id, attempt, first_index, tokens, cached, end_state, end_reason, terminal, logprobs)
  local req, out = REQUEST:format(id), OUT:format(id)

  -- PERF: nearly every append is this one, and needs five fields and two writes.
  local flat = redis.call('HMGET', req, 'state', 'attempt', 'next_index', 'losses', 'cached')
  local next_index = tonumber(flat[3])
  if flat[1] == 'streaming' and flat[2] == attempt and first_index == next_index and end_state == ''
      and flat[4] == '0' and flat[5] == cached and #tokens > 0 and logprobs == '' then
    redis.call('XADD', out, int(next_index + 1) .. '-' .. attempt, 't', tokens)
    next_index = int(next_index + #tokens / 4)
    redis.call('HSET', req, 'next_index', next_index)
    return { 'ok', next_index }
  end

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

  if #tokens > 0 and logprobs ~= '' then
    logprobs = string.sub(logprobs, (r.next_index - first_index) * (#logprobs / (#tokens / 4)) + 1)
  end
  tokens = string.sub(tokens, (r.next_index - first_index) * 4 + 1)
  if #tokens > 0 then
    local entry = int(r.next_index + 1) .. '-' .. attempt
    if logprobs ~= '' then
      redis.call('XADD', out, entry, 't', tokens, 'l', logprobs)
    else
      redis.call('XADD', out, entry, 't', tokens)
    end
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
end

local replies = {}
for n = 4, #ARGV, 9 do
  replies[#replies + 1] = append(ARGV[n], ARGV[n + 1], tonumber(ARGV[n + 2]), ARGV[n + 3], ARGV[n + 4], ARGV[n + 5],
    ARGV[n + 6], ARGV[n + 7], ARGV[n + 8])
end
return replies
