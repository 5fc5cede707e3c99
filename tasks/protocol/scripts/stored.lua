-- A page of an index of stored answers.
-- now, index, the id that the page comes after ('' = none), newest first (1/0), how many
-- Replies { id, answer ('' = its time is over) } for each, in order; nil if the place of that id is not known.
local index, after, count = ARGV[2], ARGV[3], tonumber(ARGV[5])
local rank, range = 'ZRANK', 'ZRANGE'
if ARGV[4] == '1' then
  rank, range = 'ZREVRANK', 'ZREVRANGE'
end
local start = 0
if after ~= '' then
  local place = redis.call(rank, index, after)
  if place then
    start = place + 1
  else
    -- Who deletes what a page shows goes on after it all the same.
    local score = redis.call('GET', DELETED:format(after))
    if not score then
      return nil
    end
    redis.call('ZADD', index, score, after)
    start = redis.call(rank, index, after)
    redis.call('ZREM', index, after)
  end
end
local page = {}
for _, id in ipairs(redis.call(range, index, int(start), int(start + count - 1))) do
  page[#page + 1] = { id, redis.call('HGET', REQUEST:format(id), 'answer') or '' }
end
return page
