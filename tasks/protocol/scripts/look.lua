-- What to do about a record whose time in tf:due has come.
-- now, id, queue_empty (1/0), first_token_deadline_ms, lease_check_ms, no_worker terminal, deadline terminal,
-- max_attempts, poison terminal, offer_deadline_ms, active_ttl_ms, stream_ttl_ms, disconnect terminal
local id, queue_empty = ARGV[2], ARGV[3] == '1'
local deadline, lease_check, offer_deadline = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[10])
local r = record(id)
if not r or is_over(r) then
  redis.call('ZREM', DUE, id)
  return nil
end

if r.unread_ms and now >= r.unread_ms then
  finish(r, 'cancelled', 'disconnect', ARGV[13], '', ARGV[12])
  return { 'cancelled', 'disconnect' }
end
if is_held(r) and not is_live(r.model, r.worker) then
  return lose(r, 'lost', 'worker_lost', tonumber(ARGV[8]), ARGV[9], offer_deadline, ARGV[11], ARGV[12])
end
if (r.state == 'offered' or r.next_index == 0) and now >= r.waiting_ms + deadline then
  -- A stream that nobody continues waits for workers of its fingerprint, whatever other workers there are.
  if r.next_index > 0 or redis.call('ZCOUNT', WORKERS:format(r.model), '(' .. int(now), '+inf') == 0 then
    finish(r, 'failed', 'no_worker', ARGV[6], '', ARGV[12])
    return { 'failed', 'no_worker' }
  end
  finish(r, 'failed', 'first_token_deadline', ARGV[7], '', ARGV[12])
  return { 'failed', 'first_token_deadline' }
end
if is_held(r) then
  look_at(r, now + lease_check)
  return nil
end
if now < r.offered_ms + offer_deadline then
  look_at(r, r.offered_ms + offer_deadline)
  return nil
end
local mark = tonumber(redis.call('GET', CLAIMED_UNTIL:format(r.queue))) or 0
if queue_empty or r.offered_ms < mark then
  return offer_again(r, 'lost', 'message_lost', false, offer_deadline, ARGV[11])
end
look_at(r, now + offer_deadline)
return nil
