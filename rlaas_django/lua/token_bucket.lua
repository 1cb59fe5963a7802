--[[
  Token bucket: `capacity` units at once, refilled at `limit` per `window`.
  Version  3

  State  STRING at <key>, <used>:<stamp>: what is missing from the full bucket at that ms, in 1/window of a unit, so
         that a ms refills exactly `limit` of it; expires a window after the bucket would be full

  Nothing is rounded: `used` is a whole number below 2^52 (the settings see to it).
]]
--# state
local used, stamp

--# read
local found, passed = call("GET", key), 0
used, stamp = 0, now
if found then
  used, stamp = string.match(found, "^(%d+):(%d+)$")
  stamp = stamp + 0
  if stamp < now then -- else the clock stepped back, and refills nothing until it is there again
    passed, stamp = now - stamp, now
  end
  used = used - passed * limit
  if used < 0 then
    used = 0
  end
end
count = math.ceil(used / window)

--# write
local full = math.ceil(used / limit)
local text = used < 1e14 and used or string.format("%.0f", used) -- `..` keeps 14 digits
call("SET", key, text .. ":" .. (stamp == now and at or stamp), "PX", full + window)

--# check
--> read
reset_after = used > 0 and stamp - now + math.ceil(used / limit) or 0

--# wait
retry_after = stamp - now + math.ceil((used - (capacity - cost) * window) / limit)

--# charge
used = used + cost * window
--> write
reset_after, charged_at = stamp - now + full, now

--# refund
local count
--> state
--> read
local given = math.min(cost, count)
if given > 0 then
  used = math.max(0, used - given * window)
  --> write
end
return given
