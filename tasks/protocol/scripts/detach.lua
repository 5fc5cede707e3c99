-- now, reader, grace_ms, disconnect terminal, stream_ttl_ms, then ids. Replies the ids that ended with it.
local reader, grace, terminal, stream_ttl = ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local ended = {}
for n = 6, #ARGV do
  local id = ARGV[n]
  local r, req, readers = record(id), REQUEST:format(id), READERS_OF:format(id)
  local has_left = redis.call('SREM', readers, reader) == 1
  redis.call('SREM', READER_OPEN:format(reader), id)
  if r and has_left and not is_over(r) and redis.call('EXISTS', readers) == 0 then
    local wait = math.max(grace, tonumber(redis.call('HGET', req, 'grace_ms')) or 0)
    if wait > 0 then
      r.unread_ms = now + wait
      redis.call('HSET', req, 'unread_ms', int(r.unread_ms))
      look_at(r, tonumber(redis.call('ZSCORE', DUE, id)) or r.unread_ms)
    else
      finish(r, 'cancelled', 'disconnect', terminal, '', stream_ttl)
      ended[#ended + 1] = id
    end
  end
end
return ended
