-- Shared by all scripts; the key templates of tasks/keys.py stand before it as locals.
-- Every script takes now_ms as ARGV[1]; '' means the server's own clock.

local function int(number)
  return string.format('%.0f', number)
end

local function clock()
  if ARGV[1] ~= '' then
    return tonumber(ARGV[1])
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local now = clock()

local function event(kind, id, attempt, worker, model, details)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', int(MAX_EVENTS), '*', 'k', kind, 'id', id, 'a', attempt, 'w', worker,
    'm', model, 't', int(now), 'd', details)
end

local function details(fields)
  return next(fields) and cjson.encode(fields) or '{}'
end

-- The record of `id` as a table of strings ('' where a field is absent), or nil when there is none.
-- `unread_ms` is nil unless the last reader has left: then, when the request ends unless somebody reads it again.
local function record(id)
  local flat = redis.call('HMGET', REQUEST:format(id), 'state', 'attempt', 'model', 'worker', 'next_index',
    'fingerprint', 'losses', 'offered_ms', 'waiting_ms', 'queue', 'class', 'cached', 'unread_ms', 'slot', 'logged')
  if not flat[1] then
    return nil
  end
  local function field(n)
    return flat[n] or ''
  end
  return {
    id = id, state = field(1), attempt = tonumber(flat[2]), model = field(3), worker = field(4),
    next_index = tonumber(flat[5]), fingerprint = field(6), losses = tonumber(flat[7]), offered_ms = tonumber(flat[8]),
    waiting_ms = tonumber(flat[9]), queue = field(10), class = field(11), cached = field(12),
    unread_ms = tonumber(flat[13] or nil), slot = field(14), logged = field(15),
    was_logged = flat[14] and flat[14] ~= '' or false,
  }
end

local function is_over(r)
  return r.state == 'finished' or r.state == 'cancelled' or r.state == 'failed'
end

local function is_held(r)
  return r.state == 'claimed' or r.state == 'streaming'
end

local function is_live(model, worker)
  local lease = redis.call('ZSCORE', WORKERS:format(model), worker)
  return lease and tonumber(lease) > now
end

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

-- What is compared for all that a worker holds is not what it was: something of that has ended or was moved. It is no
-- number that anybody has, not even from a Redis that has lost its last second.
local function disturb(worker)
  local rev = worker ~= '' and tonumber(redis.call('GET', REV:format(worker)) or nil)
  if rev then
    redis.call('SET', REV:format(worker), int(math.max(now, rev + 1)), 'KEEPTTL')
  end
end

-- Readers that follow a log do not see what is added to the stream of `r` itself.
local function tell_readers(r)
  if not r.was_logged then
    return
  end
  local readers = redis.call('SMEMBERS', READERS_OF:format(r.id))
  for reader in (redis.call('HGET', REQUEST:format(r.id), 'followers') or ''):gmatch('%S+') do
    readers[#readers + 1] = reader
  end
  for _, reader in ipairs(readers) do
    redis.call('XADD', CONTROL:format(reader), 'MAXLEN', '~', CONTROL_KEPT, '*', 'o', r.id)
    redis.call('PEXPIRE', CONTROL:format(reader), CONTROL_TTL_MS)
  end
end

-- `reader` reads `id` too, which outlives its readers: it is to be told, and nothing else depends on it.
local function follow(id, reader)
  local followers = redis.call('HGET', REQUEST:format(id), 'followers') or ''
  if not (followers .. ' '):find(' ' .. reader .. ' ', 1, true) then
    redis.call('HSET', REQUEST:format(id), 'followers', followers .. ' ' .. reader)
  end
end

-- Put a message into one of Dramatiq's queues and wake a consumer for each of `num_tokens`. `place`: the numbers of
-- this database and of Dramatiq's, and its namespace, separated by spaces.
local function enqueue(place, queue, message_id, message, num_tokens)
  local here, there, namespace = place:match('(%d+) (%d+) (%S+)')
  local wake = WAKE:format(queue)
  for _ = 1, num_tokens do
    redis.call('LPUSH', wake, '1')
  end
  redis.call('LTRIM', wake, 0, MAX_WAKE_TOKENS - 1)
  redis.call('PEXPIRE', wake, WAKE_TTL_MS)
  redis.call('SELECT', there)
  redis.call('HSET', MESSAGES:format(namespace, queue), message_id, message)
  redis.call('RPUSH', MESSAGE_LIST:format(namespace, queue), message_id)
  redis.call('SELECT', here)
end

-- Somebody has to look at `r` at that time, or earlier if its readers have left.
local function look_at(r, time)
  redis.call('ZADD', DUE, int(math.min(time, r.unread_ms or time)), r.id)
end

local function attach(id, reader, reader_lease, active_ttl)
  redis.call('SADD', READERS_OF:format(id), reader)
  redis.call('PEXPIRE', READERS_OF:format(id), active_ttl)
  redis.call('SADD', READER_OPEN:format(reader), id)
  redis.call('PEXPIRE', READER_OPEN:format(reader), active_ttl)
  -- Whoever reads is watched, also before its first heartbeat and after it was believed dead.
  redis.call('ZADD', READERS, 'NX', int(now + reader_lease), reader)
  redis.call('PEXPIRE', READERS, active_ttl)
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

-- Put the next attempt of `r` on offer. `let_down` restarts the clock of how long the request has been waiting.
local function offer_again(r, kind, reason, let_down, offer_deadline, active_ttl)
  fold(r)
  disturb(r.worker)
  tell_readers(r)
  local last = int(r.attempt)
  local last_worker = r.worker
  local waiting, req = WAITING:format(r.model, r.class), REQUEST:format(r.id)
  if last_worker ~= '' then
    redis.call('SREM', HELD:format(last_worker), r.id)
  end
  r.attempt = r.attempt + 1
  r.queue = r.next_index > 0 and QUEUE_CONTINUE:format(r.model, r.fingerprint) or QUEUE_AGAIN:format(r.model)
  redis.call('HSET', req, 'state', 'offered', 'attempt', int(r.attempt), 'worker', '', 'queue', r.queue,
    'losses', int(r.losses), 'offered_ms', int(now), 'released', last_worker .. '/' .. last,
    'fence', '', 'slot', '', 'logged', '')
  if let_down then
    redis.call('HSET', req, 'waiting_ms', int(now))
  end
  redis.call('ZADD', waiting, int(now), r.id)
  redis.call('PEXPIRE', waiting, active_ttl)
  look_at(r, now + offer_deadline)
  event(kind, r.id, last, last_worker, r.model, details({ reason = reason, next_index = r.next_index }))
  event('reoffered', r.id, int(r.attempt), '', r.model, details({ reason = reason, next_index = r.next_index }))
  return { 'offered', int(r.attempt), r.queue }
end

-- A worker let `r` down without its own intent: poison when that happened too often without a token in between.
local function lose(r, kind, reason, max_attempts, terminal, offer_deadline, active_ttl, stream_ttl)
  r.losses = r.losses + 1
  if r.losses >= max_attempts then
    event(kind, r.id, int(r.attempt), r.worker, r.model, details({ reason = reason, next_index = r.next_index }))
    finish(r, 'failed', 'poison', terminal, '', stream_ttl)
    return { 'failed', 'poison' }
  end
  return offer_again(r, kind, reason, true, offer_deadline, active_ttl)
end
