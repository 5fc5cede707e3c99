-- now, ttl_ms, then ids of requests that may still be submitted, by a call that was given up. Each that is unknown gets
-- the record of a request that is over, without an attempt: a submit that arrives within the time finds it.
for n = 3, #ARGV do
  local req = REQUEST:format(ARGV[n])
  if redis.call('EXISTS', req) == 0 then
    redis.call('HSET', req, 'state', 'cancelled', 'reason', 'not_accepted', 'attempt', '0', 'next_index', '0',
      'losses', '0', 'choices', ARGV[n], 'outlives', '0', 'ended_ms', int(now))
    redis.call('PEXPIRE', req, ARGV[2])
  end
end
return 1
