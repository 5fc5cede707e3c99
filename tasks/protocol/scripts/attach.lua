-- now, reader, reader_lease_ms, active_ttl_ms, then ids. Replies 1 for each that has not ended.
local reader, reader_lease, active_ttl = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local replies = {}
for n = 5, #ARGV do
  local id = ARGV[n]
  local r = record(id)
  local is_open = r ~= nil and not is_over(r)
  if is_open and redis.call('HGET', REQUEST:format(id), 'outlives') ~= '1' then
    attach(id, reader, reader_lease, active_ttl)
    redis.call('HDEL', REQUEST:format(id), 'unread_ms')
  elseif is_open then
    follow(id, reader)
  end
  replies[#replies + 1] = is_open and 1 or 0
end
return replies
