--[[
  Sliding window counter: the previous window's count, weighted by what of it is still in sight, and this window's.
  Version  2

  State  STRING at <key>, <index>:<previous>:<current>; expires two windows after the last charge

  Allowed iff previous * (window - elapsed) + (current + cost) * window <= limit * window. The products stay below
  2^52 (the settings see to it), where a quotient of whole numbers rounds to the right side.
]]
local key, limit, window = p.key, p.limit, p.window

if step ~= "charge" then
  local index, previous, current = math.floor(now / window), 0, 0
  local found = call("GET", key)
  if found then
    local stored, before, within = string.match(found, "^(%d+):(%d+):(%d+)$")
    stored = stored + 0
    if stored >= index then
      index, previous, current = stored, before + 0, within + 0 -- later than now: the clock stepped back
    elseif stored == index - 1 then
      previous = within + 0
    end
  end
  p.index, p.previous, p.current = index, previous, current
end
local index, previous, current = p.index, p.previous, p.current
local start = index * window

if step == "check" then
  local count, reset_after = current, 0
  if previous > 0 then
    count = count + math.ceil(previous * (window - math.max(0, now - start)) / window)
    reset_after = start + window - now
  end
  if current > 0 then
    reset_after = start + 2 * window - now
  end

  local remaining = limit - count
  if cost <= remaining then
    return true, count, remaining, 0, reset_after
  end
  -- What was counted before a window takes no more than `spare` units once that part of the window has passed.
  local retry_after = -1
  if current + cost <= limit then
    local spare = limit - current - cost
    retry_after = start + window - math.floor(spare * window / previous) - now
  elseif cost <= limit then
    local spare = limit - cost
    retry_after = start + window + math.max(0, window - math.floor(spare * window / current)) - now
  end
  return false, count, math.max(0, remaining), retry_after, reset_after
end

local given = 0
if step == "charge" then
  current = current + cost
else
  local behind = index - math.floor(charged_at / window)
  if behind == 0 then
    given = math.min(cost, current)
    current = current - given
  end
  if behind == 1 or unique == "" then
    local earlier = math.min(cost - given, previous)
    previous, given = previous - earlier, given + earlier
  end
  if given == 0 then
    return given
  end
end
call("SET", key, string.format("%.0f:%.0f:%.0f", index, previous, current), "PX", 2 * window)
if step == "charge" then
  return start + 2 * window - now, start
end
return given
