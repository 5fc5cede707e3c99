-- Who reads a request.

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

local function attach(id, reader, reader_lease, active_ttl)
  redis.call('SADD', READERS_OF:format(id), reader)
  redis.call('PEXPIRE', READERS_OF:format(id), active_ttl)
  redis.call('SADD', READER_OPEN:format(reader), id)
  redis.call('PEXPIRE', READER_OPEN:format(reader), active_ttl)
  -- Whoever reads is watched, also before its first heartbeat and after it was believed dead.
  redis.call('ZADD', READERS, 'NX', int(now + reader_lease), reader)
  redis.call('PEXPIRE', READERS, active_ttl)
end
