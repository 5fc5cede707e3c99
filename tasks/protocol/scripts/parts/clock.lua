-- The time of a call: every script takes now_ms as ARGV[1]; '' means the server's own clock.

local function int(number)
  return string.format('%.0f', number)
end

local function clock()
  if ARGV[1] ~= '' then
    return tonumber(ARGV[1])
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local now = clock()
