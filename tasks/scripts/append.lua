-- The tokens of one engine step: as many assignments as there are groups of arguments, one reply for each: the
-- next index, or a list with the reason of the refusal.
-- now, active_ttl_ms, stream_ttl_ms, then for each: id, attempt, first_index, packed tokens, cached tokens, entry id,
--   and if the entry id is not '', because there are tokens and nothing else: index after the tokens
--   otherwise: end state ('' = goes on), end reason, terminal entry, packed log probabilities ('' = none)
local active_ttl, stream_ttl = ARGV[2], ARGV[3]

local function append(id, attempt, first_index, tokens, cached, end_state, end_reason, terminal, logprobs)
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
      return int(r.next_index)
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
  return int(r.next_index)
end

-- PERF: nearly every append is this one. It compares and writes the strings that it was given: 12 -> 8 microseconds.
local function append_plain(id, attempt, first_index, tokens, cached, entry, next_index)
  local req = REQUEST:format(id)
  local flat = redis.call('HMGET', req, 'state', 'attempt', 'next_index', 'losses', 'cached')
  if flat[1] == 'streaming' and flat[2] == attempt and flat[3] == first_index and flat[4] == '0'
      and flat[5] == cached then
    redis.call('XADD', OUT:format(id), entry, 't', tokens)
    redis.call('HSET', req, 'next_index', next_index)
    return next_index
  end
  return append(id, attempt, tonumber(first_index), tokens, cached, '', '', '', '')
end

local replies = {}
local n = 4
while n <= #ARGV do
  local id, attempt, first_index, tokens, cached, entry = unpack(ARGV, n, n + 5)
  if entry ~= '' then
    replies[#replies + 1] = append_plain(id, attempt, first_index, tokens, cached, entry, ARGV[n + 6])
    n = n + 7
  else
    replies[#replies + 1] = append(id, attempt, tonumber(first_index), tokens, cached, unpack(ARGV, n + 6, n + 9))
    n = n + 10
  end
end
return replies
