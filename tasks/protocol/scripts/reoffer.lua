-- now, id, attempt, reason ('worker_lost' or 'message_lost'), max_attempts, poison terminal, offer_deadline_ms,
-- active_ttl_ms, stream_ttl_ms
local id, attempt, reason = ARGV[2], ARGV[3], ARGV[4]
local r = record(id)
if not r or is_over(r) or int(r.attempt) ~= attempt then
  return nil
end
if reason == 'worker_lost' then
  if not is_held(r) or is_live(r.model, r.worker) then
    return nil
  end
  return lose(r, 'lost', reason, tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9])
end
if r.state ~= 'offered' then
  return nil
end
return offer_again(r, 'lost', reason, false, tonumber(ARGV[7]), ARGV[8])
