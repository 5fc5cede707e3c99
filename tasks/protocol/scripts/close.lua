-- now, id, state, reason, terminal entry, stream_ttl_ms
local r = record(ARGV[2])
if not r or is_over(r) then
  return 0
end
finish(r, ARGV[3], ARGV[4], ARGV[5], '', ARGV[6])
return 1
