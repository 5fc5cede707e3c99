-- A step of an engine of which everything goes into the log, as nearly every one: `append` without appends.
-- now (not asked), worker, rev, number of the step, packed tokens ('' = none).
-- Replies 1, or the rev that it is, of a Redis that has one ('' otherwise): nothing was written.
local worker, rev, step, packed = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local found = redis.call('GET', REV:format(worker))
if found ~= rev then
  return found or ''
end
return packed ~= '' and add_step(worker, step, packed) or 1
