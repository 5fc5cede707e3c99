-- Facts for the recorder.

local function event(kind, id, attempt, worker, model, details)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', int(MAX_EVENTS), '*', 'k', kind, 'id', id, 'a', attempt, 'w', worker,
    'm', model, 't', int(now), 'd', details)
end

local function details(fields)
  return next(fields) and cjson.encode(fields) or '{}'
end
