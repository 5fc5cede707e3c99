-- now, id, attempt, worker, reason, counts (1: the worker failed, towards poison), max_attempts, poison terminal,
-- offer_deadline_ms, active_ttl_ms, stream_ttl_ms
local id, attempt, worker, reason = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local r = record(id)
if not r or is_over(r) then
  return nil
end
if r.state == 'offered' and redis.call('HGET', REQUEST:format(id), 'released') == worker .. '/' .. attempt then
  return { 'offered', int(r.attempt), r.queue }
end
if int(r.attempt) ~= attempt or not is_held(r) or r.worker ~= worker then
  return nil
end
if ARGV[6] == '1' then
  return lose(r, 'released', reason, tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9]), ARGV[10], ARGV[11])
end
-- What does not fit here has been waiting for somebody whom it fits since it was let down: no new deadline.
return offer_again(r, 'released', reason, reason ~= 'too_large', tonumber(ARGV[9]), ARGV[10])
