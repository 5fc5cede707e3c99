-- The record of a request.

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

-- Somebody has to look at `r` at that time, or earlier if its readers have left.
local function look_at(r, time)
  redis.call('ZADD', DUE, int(math.min(time, r.unread_ms or time)), r.id)
end
