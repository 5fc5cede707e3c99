-- How a request goes to another worker.

-- Put the next attempt of `r` on offer. `let_down` restarts the clock of how long the request has been waiting.
local function offer_again(r, kind, reason, let_down, offer_deadline, active_ttl)
  fold(r)
  disturb(r.worker)
  tell_readers(r)
  local last = int(r.attempt)
  local last_worker = r.worker
  local waiting, req = WAITING:format(r.model, r.class), REQUEST:format(r.id)
  if last_worker ~= '' then
    redis.call('SREM', HELD:format(last_worker), r.id)
  end
  r.attempt = r.attempt + 1
  r.queue = r.next_index > 0 and QUEUE_CONTINUE:format(r.model, r.fingerprint) or QUEUE_AGAIN:format(r.model)
  redis.call('HSET', req, 'state', 'offered', 'attempt', int(r.attempt), 'worker', '', 'queue', r.queue,
    'losses', int(r.losses), 'offered_ms', int(now), 'released', last_worker .. '/' .. last,
    'fence', '', 'slot', '', 'logged', '')
  if let_down then
    redis.call('HSET', req, 'waiting_ms', int(now))
  end
  redis.call('ZADD', waiting, int(now), r.id)
  redis.call('PEXPIRE', waiting, active_ttl)
  look_at(r, now + offer_deadline)
  event(kind, r.id, last, last_worker, r.model, details({ reason = reason, next_index = r.next_index }))
  event('reoffered', r.id, int(r.attempt), '', r.model, details({ reason = reason, next_index = r.next_index }))
  return { 'offered', int(r.attempt), r.queue }
end

-- A worker let `r` down without its own intent: poison when that happened too often without a token in between.
local function lose(r, kind, reason, max_attempts, terminal, offer_deadline, active_ttl, stream_ttl)
  r.losses = r.losses + 1
  if r.losses >= max_attempts then
    event(kind, r.id, int(r.attempt), r.worker, r.model, details({ reason = reason, next_index = r.next_index }))
    finish(r, 'failed', 'poison', terminal, '', stream_ttl)
    return { 'failed', 'poison' }
  end
  return offer_again(r, kind, reason, true, offer_deadline, active_ttl)
end
