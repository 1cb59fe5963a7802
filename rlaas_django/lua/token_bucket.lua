--[[
  Token bucket: `capacity` units at once, refilled at `limit` per `window`.
  Version  1

  State  STRING at <key>, <used>:<stamp>: what is missing from the full bucket at that ms, in 1/window of a unit, so
         that a ms refills exactly `limit` of it; expires a window after the bucket would be full

  Nothing is rounded: `used` is a whole number below 2^52 (the settings see to it).
]]
local function read(p, now)
  local found = redis.call("GET", p.key)
  if not found then
    return 0, now
  end
  local used, stamp = string.match(found, "^(%d+):(%d+)$")
  used, stamp = tonumber(used), tonumber(stamp)
  if stamp >= now then
    return used, stamp -- later than now: the clock stepped back, and refills nothing until it is there again
  end
  return math.max(0, used - (now - stamp) * p.limit), now
end

local function write(p)
  redis.call("SET", p.key, digits(p.used) .. ":" .. digits(p.stamp),
    "PX", digits(math.ceil(p.used / p.limit) + p.window))
end

-- Until at most `level` is missing.
local function refilled(p, level, now)
  return p.used > level and p.stamp - now + math.ceil((p.used - level) / p.limit) or 0
end

local function check(p, now, cost)
  p.used, p.stamp = read(p, now)
  local count = math.ceil(p.used / p.window)

  local allowed = count + cost <= p.capacity
  local retry_after = 0
  if not allowed then
    retry_after = cost > p.capacity and -1 or refilled(p, (p.capacity - cost) * p.window, now)
  end
  p.left = math.max(0, p.capacity - count)
  return allowed, count, p.left, retry_after, refilled(p, 0, now)
end

local function charge(p, now, cost)
  p.used = p.used + cost * p.window
  write(p)
  return p.left - cost, refilled(p, 0, now), now
end

local function refund(p, now, cost)
  p.used, p.stamp = read(p, now)
  local given = math.min(cost, math.ceil(p.used / p.window))
  if given > 0 then
    p.used = math.max(0, p.used - given * p.window)
    write(p)
  end
  return given
end

return { check = check, charge = charge, refund = refund }
