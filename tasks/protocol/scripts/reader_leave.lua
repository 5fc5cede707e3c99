-- now, reader, by the watchdog (1) or by itself (0). Replies 1 if the reader is forgotten.
-- What it still reads is never forgotten with it: its lease is over now, and the watchdog comes (again).
local reader, by_watchdog = ARGV[2], ARGV[3] == '1'
local lease = tonumber(redis.call('ZSCORE', READERS, reader) or nil)
if by_watchdog and lease and lease > now then
  return 0
end
if redis.call('EXISTS', READER_OPEN:format(reader)) == 1 then
  redis.call('ZADD', READERS, 0, reader)
  return 0
end
redis.call('ZREM', READERS, reader)
return 1
