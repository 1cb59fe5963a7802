--[[
  Opens every script.
  Version  1

  now      ARGV[1] in ms; '' asks the server's clock, once per script
  digits   a whole number as text; tostring() loses digits beyond the 14th
]]
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call("TIME")
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local function digits(number)
  return string.format("%.0f", number)
end

local algorithms = {}
