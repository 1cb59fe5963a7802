--[[
  Opens every script.
  Version  3

  now      ARGV[1] in ms; '' asks the server's clock, once per script
  at       the same as text. To make a text of a number takes as long as a short command, so commands get this one, and
           numbers that are always the same are written as texts
  call     redis.call, which writes a number with all its digits; `..` and tostring() keep 14
]]
local call, at = redis.call, ARGV[1]
if at == "" then
  local time = call("TIME") -- seconds, and µs without leading zeros
  local us = #time[2] == 6 and time[2] or string.sub("00000" .. time[2], -6)
  at = time[1] .. string.sub(us, 1, 3)
end
local now = at + 0
