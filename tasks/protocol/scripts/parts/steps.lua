-- The log of a worker.

-- Put the packed tokens of one step into the log. Returns an error of Redis, or nil.
local function add_step(worker, entry, packed)
  local steps = STEPS:format(worker)
  local added = redis.pcall('XADD', steps, 'MAXLEN', STEPS_KEPT, entry, 's', packed)
  -- A step that is sent again after a lost reply is there already.
  if type(added) == 'table' and added.err and not tostring(added.err):find('equal or smaller', 1, true) then
    return added
  end
  redis.call('PEXPIRE', steps, STEPS_TTL_MS)
  return nil
end
