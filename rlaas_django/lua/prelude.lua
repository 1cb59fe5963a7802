--[[
  Opens every script.
  Version  2

  now      ARGV[1] in ms; '' asks the server's clock, once per script
  call     redis.call, which writes a number with all its digits; `..` and tostring() keep 14
]]
local call = redis.call

local now = tonumber(ARGV[1])
if not now then
  local time = call("TIME")
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local algorithms = {}
