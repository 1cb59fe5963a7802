--[[
  Token bucket: `capacity` units at once, refilled at `limit` per `window`.
  Version  2

  State  STRING at <key>, <used>:<stamp>: what is missing from the full bucket at that ms, in 1/window of a unit, so
         that a ms refills exactly `limit` of it; expires a window after the bucket would be full

  Nothing is rounded: `used` is a whole number below 2^52 (the settings see to it).
]]
local key, limit, window = p.key, p.limit, p.window

if step ~= "charge" then
  local found, used, stamp = call("GET", key), 0, now
  if found then
    used, stamp = string.match(found, "^(%d+):(%d+)$")
    used, stamp = used + 0, stamp + 0
    if stamp < now then -- else the clock stepped back, and refills nothing until it is there again
      used, stamp = math.max(0, used - (now - stamp) * limit), now
    end
  end
  p.used, p.stamp = used, stamp
end
local used, stamp = p.used, p.stamp
local count = math.ceil(used / window)

if step == "check" then
  local capacity = p.capacity
  local remaining, retry_after = capacity - count, -1
  local reset_after = used > 0 and stamp - now + math.ceil(used / limit) or 0
  if cost <= remaining then
    return true, count, remaining, 0, reset_after
  elseif cost <= capacity then
    retry_after = stamp - now + math.ceil((used - (capacity - cost) * window) / limit)
  end
  return false, count, math.max(0, remaining), retry_after, reset_after
end

local given = math.min(cost, count)
if step == "charge" then
  used = used + cost * window
elseif given > 0 then
  used = math.max(0, used - given * window)
else
  return 0
end
local full = math.ceil(used / limit)
call("SET", key, string.format("%.0f:%.0f", used, stamp), "PX", full + window)
if step == "charge" then
  return stamp - now + full, now
end
return given
