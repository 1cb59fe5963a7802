--[[
  Token bucket: `capacity` units at once, refilled at `limit` per `window`.
  Version  4

  State    STRING at <key>, <used>:<stamp>: what is missing from the full bucket at that ms, in 1/window of a unit, so
           that a ms refills exactly `limit` of it; expires a window after the bucket would be full

  check    key, now, at, limit, window, ttl, cost, capacity, charging -> count, wait, reset_after, used, stamp
  charge   key, now, at, limit, window, ttl, cost, unique, used, stamp -> reset_after, charged_at
  refund   key, now, at, limit, window, ttl, cost, unique, charged_at -> units taken back
  reset    key, now, window -> keys deleted

  Nothing is rounded: `used` is a whole number below 2^52 (the settings ensure it).
]]
local function check(key, now, at, limit, window, ttl, cost, capacity)
  local found, used, stamp = redis.call("GET", key), 0, now
  if found then
    used, stamp = string.match(found, "^(%d+):(%d+)$")
    used, stamp = used + 0, stamp + 0
    if stamp < now then -- else the clock stepped back: nothing is refilled until it is there again
      used, stamp = used - (now - stamp) * limit, now
      if used < 0 then
        used = 0
      end
    end
  end
  local count, wait = (used + -used % window) / window, 0
  if count + cost > capacity then
    wait = stamp - now + math.ceil((used - (capacity - cost) * window) / limit)
  end
  return count, wait, used > 0 and stamp - now + (used + -used % limit) / limit or 0, used, stamp
end

local function charge(key, now, at, limit, window, ttl, cost, unique, used, stamp)
  used = used + cost * window
  local full = (used + -used % limit) / limit
  local text = used < 1e14 and used or string.format("%.0f", used) -- `..` keeps 14 digits
  redis.call("SET", key, text .. ":" .. (stamp == now and at or stamp), "PX", full + window)
  return stamp - now + full, now
end

local function refund(key, now, at, limit, window, ttl, cost, unique)
  local count, _, _, used, stamp = check(key, now, at, limit, window, ttl, 0, limit)
  local units = math.min(cost, count)
  if units > 0 then -- a charge of less than nothing; part of a unit may have been refilled
    charge(key, now, at, limit, window, ttl, -units, unique, math.max(used, units * window), stamp)
  end
  return units
end

local function reset(key)
  return redis.call("DEL", key)
end

return check, charge, refund, reset
