-- All choices of one request, or none of them.
-- now, nonce (the same again when re-sent), reader ('' = nobody's), outlives its readers (1/0), max_waiting,
-- offer_deadline_ms, active_ttl_ms, reader_lease_ms, answer, idempotency key ('' = none), digest, grace_ms,
-- classes that come no later than this one (separated by spaces), where messages go (see `enqueue`),
-- the index of stored answers ('' = not to be stored), store_ms, store_max, the messages to store,
-- then for each choice: id, model, class, queue, job, details of its fact, message id, message ('' = none)
-- Replies { 'ok', id of the first choice, its attempt, 1 if made by this call }, or a refusal.
local nonce, reader, outlives, max_waiting = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local offer_deadline, active_ttl, reader_lease = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local answer, idempotency, digest, grace = ARGV[9], ARGV[10], ARGV[11], ARGV[12]
local stored_in, store_ms, store_max, input = ARGV[15], ARGV[16], ARGV[17], ARGV[18]
local first, model = ARGV[19], ARGV[20]
local choices = {}
for n = 19, #ARGV, 8 do
  choices[#choices + 1] = ARGV[n]
end

-- The answer to a submit of what is there already; nil if it is not.
local function known(id)
  local flat = redis.call('HMGET', REQUEST:format(id), 'attempt', 'nonce', 'choices', 'outlives')
  if not flat[1] then
    return nil
  end
  if reader ~= '' then
    for choice in flat[3]:gmatch('%S+') do
      local r = record(choice)
      if r and not is_over(r) and flat[4] == '1' then
        follow(choice, reader)
      elseif r and not is_over(r) then
        attach(choice, reader, reader_lease, active_ttl)
        redis.call('HDEL', REQUEST:format(choice), 'unread_ms')
      end
    end
  end
  return { 'ok', id, flat[1], flat[2] == nonce and 1 or 0 }
end

-- Whether one of these choices ended otherwise than its client may have wanted: who asks again wants another answer.
local function was_let_down(names)
  for choice in names:gmatch('%S+') do
    local flat = redis.call('HMGET', REQUEST:format(choice), 'state', 'reason')
    if flat[1] == 'failed' or flat[1] == 'cancelled' and flat[2] == 'disconnect' then
      return true
    end
  end
  return false
end

local key = IDEMPOTENCY:format(idempotency)
if idempotency ~= '' then
  -- A key lives no longer than the record that it names; one whose record is gone already is free.
  local owner = redis.call('HMGET', key, 'id', 'digest')
  local its_choices = owner[1] and redis.call('HGET', REQUEST:format(owner[1]), 'choices')
  if its_choices and owner[2] ~= digest then
    return { 'conflict', owner[1] }
  end
  if its_choices and not was_let_down(its_choices) then
    return known(owner[1])
  end
end
for _, choice in ipairs(choices) do
  local again = known(choice)
  if again then
    return again
  end
end

-- A worker whose lease has just lapsed may only have been held up, and is back in a moment.
local since = now - LATELY_MS
if redis.call('ZCOUNT', WORKERS:format(model), '(' .. int(since), '+inf') == 0
    and (tonumber(redis.call('GET', LATELY:format(model)) or nil) or 0) <= since then
  return { 'no_worker' }
end
local num_waiting = 0
for class in ARGV[13]:gmatch('%S+') do
  local waiting = WAITING:format(model, class)
  redis.call('ZREMRANGEBYSCORE', waiting, '-inf', int(now - active_ttl))
  num_waiting = num_waiting + redis.call('ZCARD', waiting)
end
if num_waiting + #choices > max_waiting then
  return { 'full', int(num_waiting) }
end

for n = 19, #ARGV, 8 do
  local id, class = ARGV[n], ARGV[n + 2]
  local req, waiting = REQUEST:format(id), WAITING:format(model, class)
  redis.call('HSET', req, 'state', 'offered', 'attempt', '1', 'model', model, 'class', class, 'job', ARGV[n + 4],
    'nonce', nonce, 'outlives', outlives, 'grace_ms', grace, 'choices', table.concat(choices, ' '),
    'idempotency', idempotency, 'worker', '', 'next_index', '0', 'fingerprint', '', 'losses', '0', 'cached', '0',
    'queue', ARGV[n + 3], 'submitted_ms', int(now), 'offered_ms', int(now), 'waiting_ms', int(now))
  redis.call('PEXPIRE', req, active_ttl)
  redis.call('ZADD', waiting, int(now), id)
  redis.call('PEXPIRE', waiting, active_ttl)
  redis.call('ZADD', DUE, int(now + offer_deadline), id)
  if reader ~= '' and outlives ~= '1' then
    attach(id, reader, reader_lease, active_ttl)
  elseif reader ~= '' then
    follow(id, reader)
  end
  event('submitted', id, '1', '', model, ARGV[n + 5])
  if ARGV[n + 7] ~= '' then
    enqueue(ARGV[14], ARGV[n + 3], ARGV[n + 6], ARGV[n + 7], 1)
  end
end
if answer ~= '' then
  redis.call('HSET', REQUEST:format(first), 'answer', answer)
end
if stored_in ~= '' then
  redis.call('HSET', REQUEST:format(first), 'stored_in', stored_in, 'store_ms', store_ms, 'store_max', store_max,
    'input', input)
end
if idempotency ~= '' then
  redis.call('HSET', key, 'id', first, 'digest', digest)
  redis.call('PEXPIRE', key, active_ttl)
end
return { 'ok', first, '1', 1 }
