-- How an attempt of a request ends, and the request with it.

-- Tokens of `r` that so far only the log of its worker has: into its own stream, before anything becomes of it.
local function fold(r)
  if r.slot == '' then
    return
  end
  local tokens, next_index = {}, r.next_index
  for _, entry in ipairs(redis.call('XRANGE', STEPS:format(r.worker), '(' .. r.logged, '+')) do
    local packed = entry[2][2]
    local at = packed:find(r.slot, 1, true)
    while at do
      if at % 12 == 1 then
        local a, b, c, d = packed:byte(at + 4, at + 7)
        if a + 256 * (b + 256 * (c + 256 * d)) == next_index then
          tokens[#tokens + 1] = packed:sub(at + 8, at + 11)
          next_index = next_index + 1
        end
      end
      at = packed:find(r.slot, at + 1, true)
    end
  end
  if #tokens > 0 then
    redis.call('XADD', OUT:format(r.id), int(r.next_index + 1) .. '-' .. int(r.attempt), 't', table.concat(tokens))
    redis.call('HSET', REQUEST:format(r.id), 'next_index', int(next_index))
    r.next_index = next_index
  end
end

-- `rev` is compared for all that `worker` holds, and its log has entries `<rev>-<step>`: from now on Redis refuses what
-- is added to it with an earlier one.
local function set_rev(worker, rev)
  local steps, mark = STEPS:format(worker), int(rev) .. '-0'
  redis.call('XADD', steps, mark, 's', '')
  redis.call('XDEL', steps, mark)
  redis.call('PEXPIRE', steps, STEPS_TTL_MS)
  redis.call('SET', WORKER_REV:format(worker), int(rev), 'PX', STEPS_TTL_MS)
end

-- Something of what a worker holds has ended or was moved. The new `rev` is no number that anybody has, not even from a
-- Redis that has lost its last second.
local function disturb(worker)
  local rev = worker ~= '' and tonumber(redis.call('GET', WORKER_REV:format(worker)) or nil)
  if rev then
    set_rev(worker, math.max(now, rev + 1))
  end
end

-- What is stored beyond `max_kept` lives as long as what is not stored; the oldest go first, `id` does not.
local function trim_stored(index, id, max_kept, stream_ttl)
  for _ = 1, MAX_TRIMMED do
    local oldest = redis.call('ZRANGE', index, 0, 1)
    local victim = oldest[1] == id and oldest[2] or oldest[1]
    local choices = redis.call('HGET', REQUEST:format(victim), 'choices')
    if choices and redis.call('ZCARD', index) <= max_kept then
      return
    end
    redis.call('ZREM', index, victim)
    for choice in (choices or ''):gmatch('%S+') do
      for _, key in ipairs({ REQUEST:format(choice), OUT:format(choice) }) do
        redis.call('PEXPIRE', key, int(math.min(redis.call('PTTL', key), tonumber(stream_ttl))))
      end
    end
  end
end

-- Put a finished answer that was asked to be stored into its index. Returns for how long it is kept.
local function store(id, stream_ttl)
  local wanted = redis.call('HMGET', REQUEST:format(id), 'stored_in', 'store_ms', 'store_max', 'submitted_ms')
  if not wanted[1] then
    return stream_ttl
  end
  redis.call('ZADD', wanted[1], wanted[4], id)
  redis.call('PEXPIRE', wanted[1], int(math.max(tonumber(wanted[2]), redis.call('PTTL', wanted[1]))))
  trim_stored(wanted[1], id, tonumber(wanted[3]), stream_ttl)
  return wanted[2]
end

-- The choices of one request end together: the last of them to end starts the time for which all are kept.
local function expire_choices(id, choices, idempotency, stream_ttl)
  local ids, are_finished = {}, true
  for choice in choices:gmatch('%S+') do
    local state = redis.call('HGET', REQUEST:format(choice), 'state')
    if state and not is_over({ state = state }) then
      return
    end
    ids[#ids + 1] = choice
    are_finished = are_finished and state == 'finished'
  end
  local kept = are_finished and store(ids[1], stream_ttl) or stream_ttl
  for _, choice in ipairs(ids) do
    redis.call('PEXPIRE', REQUEST:format(choice), kept)
    redis.call('PEXPIRE', OUT:format(choice), kept)
  end
  local key = IDEMPOTENCY:format(idempotency)
  if idempotency ~= '' and redis.call('HGET', key, 'id') == ids[1] then
    redis.call('PEXPIRE', key, stream_ttl)
  end
end

-- The one way a record ends. `ended_by` is the attempt whose own append ended it, '' otherwise. The record knows who
-- held the request and how much of its prompt was restored from the prefix cache; `terminal` gets it from there.
local function finish(r, state, reason, terminal, ended_by, stream_ttl)
  fold(r)
  disturb(r.worker)
  local entry = cjson.decode(terminal)
  entry.worker = r.worker
  entry.num_cached_tokens = tonumber(r.cached) or 0
  local out, req, readers = OUT:format(r.id), REQUEST:format(r.id), READERS_OF:format(r.id)
  redis.call('XADD', out, int(r.next_index + 1) .. '-' .. int(r.attempt), 'e', cjson.encode(entry))
  redis.call('HSET', req, 'state', state, 'reason', reason, 'ended_ms', int(now), 'ended_by', ended_by)
  redis.call('ZREM', DUE, r.id)
  redis.call('ZREM', WAITING:format(r.model, r.class), r.id)
  if r.worker ~= '' then
    redis.call('SREM', HELD:format(r.worker), r.id)
  end
  tell_readers(r)
  for _, reader in ipairs(redis.call('SMEMBERS', readers)) do
    redis.call('SREM', READER_OPEN:format(reader), r.id)
  end
  redis.call('DEL', readers)
  redis.call('HDEL', req, 'job', 'unread_ms', 'fence', 'slot', 'logged', 'followers')
  redis.call('PEXPIRE', out, redis.call('PTTL', req))
  local family = redis.call('HMGET', req, 'choices', 'idempotency')
  expire_choices(r.id, family[1] or r.id, family[2] or '', stream_ttl)
  event('ended', r.id, int(r.attempt), r.worker, r.model, details({
    state = state, reason = reason, next_index = r.next_index, cached = tonumber(r.cached) or 0,
    message = state == 'failed' and entry.message or nil }))
end
