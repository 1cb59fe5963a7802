--[[
  Sliding window counter: the previous window's count, weighted by what of it is still in sight, and this window's.
  Version  1

  State  STRING at <key>, <index>:<previous>:<current>; expires two windows after the last charge

  Allowed iff previous * (window - elapsed) + (current + cost) * window <= limit * window. The products stay below
  2^52 (the settings see to it), where a quotient of whole numbers rounds to the right side.
]]
local function read(p, now)
  local index, found = math.floor(now / p.window), redis.call("GET", p.key)
  local previous, current = 0, 0
  if found then
    local stored, before, within = string.match(found, "^(%d+):(%d+):(%d+)$")
    stored, before, within = tonumber(stored), tonumber(before), tonumber(within)
    if stored >= index then
      index, previous, current = stored, before, within -- later than now: the clock stepped back
    elseif stored == index - 1 then
      previous = within
    end
  end
  return index, previous, current
end

local function write(p)
  redis.call("SET", p.key, digits(p.index) .. ":" .. digits(p.previous) .. ":" .. digits(p.current),
    "PX", digits(2 * p.window))
end

-- How long after the start of a window `spare` units and no more are taken by what `counted` there was before it.
local function faded(spare, counted, window)
  return window - math.floor(spare * window / counted)
end

local function reset_after(p, start, now)
  if p.current > 0 then
    return start + 2 * p.window - now
  end
  return p.previous > 0 and start + p.window - now or 0
end

local function check(p, now, cost)
  p.index, p.previous, p.current = read(p, now)
  local start = p.index * p.window
  local elapsed = math.max(0, now - start)
  local count = p.current + math.ceil(p.previous * (p.window - elapsed) / p.window)

  local allowed = count + cost <= p.limit
  local retry_after = 0
  if not allowed then
    if cost > p.limit then
      retry_after = -1
    elseif p.current + cost <= p.limit then
      retry_after = start + faded(p.limit - p.current - cost, p.previous, p.window) - now
    else
      retry_after = start + p.window + math.max(0, faded(p.limit - cost, p.current, p.window)) - now
    end
  end
  p.left = math.max(0, p.limit - count)
  return allowed, count, p.left, retry_after, reset_after(p, start, now)
end

local function charge(p, now, cost)
  p.current = p.current + cost
  write(p)
  return p.left - cost, reset_after(p, p.index * p.window, now), p.index * p.window
end

local function refund(p, now, cost, charged_at, unique)
  p.index, p.previous, p.current = read(p, now)
  local behind, given = p.index - math.floor(charged_at / p.window), 0
  if behind == 0 then
    given = math.min(cost, p.current)
    p.current = p.current - given
  end
  if behind == 1 or unique == "" then
    local earlier = math.min(cost - given, p.previous)
    p.previous, given = p.previous - earlier, given + earlier
  end
  if given > 0 then
    write(p)
  end
  return given
end

return { check = check, charge = charge, refund = refund }
