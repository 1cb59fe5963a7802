--[[
  Sliding window counter: the previous window's count, weighted by the part of it that is still within a window of now,
  and this window's.
  Version  5

  State    STRING at <key>, <index>:<previous>:<current>; expires two windows after the last charge

  check    key, now, at, limit, window, ttl, cost, capacity, charging
           -> count, wait, reset_after, index, previous, current, prefix
           prefix is the stored <index>:<previous>: when a charge leaves it as it is
  charge   key, now, at, limit, window, ttl, cost, unique, index, previous, current, prefix
           -> reset_after, charged_at, more_after
           more_after is nil where it takes units of the previous window only, as the check found
  refund   key, now, at, limit, window, ttl, cost, unique, charged_at -> units taken back
  reset    key, now, window -> keys deleted

  Allowed iff previous * (window - elapsed) + (current + cost) * window <= limit * window. The products stay below
  2^52 (the settings ensure it), where a quotient of whole numbers rounds to the right side. The three numbers stay
  below 10^14, so that `..` keeps all their digits.
]]
local function check(key, now, at, limit, window, ttl, cost)
  local index, previous, current, prefix = (now - now % window) / window, 0, 0, nil
  local found = redis.call("GET", key)
  if found then
    local same, stored, before, within = string.match(found, "^((%d+):(%d+):)(%d+)$")
    stored = stored + 0
    if stored >= index then -- later than now when the clock stepped back
      index, previous, current, prefix = stored, before + 0, within + 0, same
    elseif stored == index - 1 then
      previous = within + 0
    end
  end
  local start = index * window
  local count, wait, reset_after = current, 0, 0
  if previous > 0 then
    count = count + math.ceil(previous * (window - (now > start and now - start or 0)) / window)
    reset_after = start + window - now
  end
  if current > 0 then
    reset_after = start + 2 * window - now
  end
  if count + cost > limit and cost <= limit then
    -- What was counted before a window takes no more than `spare` units once that part of the window has passed.
    if current + cost <= limit then
      local spare = limit - current - cost
      wait = start + window - math.floor(spare * window / previous) - now
    else
      local spare = limit - cost
      wait = start + window + math.max(0, window - math.floor(spare * window / current)) - now
    end
  elseif previous > 0 then
    -- It fits. One unit less is counted once the rest of those of the previous window take no more.
    wait = start + window - math.floor((count - current - 1) * window / previous) - now
  elseif current > 0 then
    wait = start + window + (window + -window % current) / current - now
  end
  return count, wait, reset_after, index, previous, current, prefix
end

local function charge(key, now, at, limit, window, ttl, cost, unique, index, previous, current, prefix)
  redis.call("SET", key, (prefix or index .. ":" .. previous .. ":") .. current + cost, "PX", ttl)
  local start = index * window
  local charged_at = start < now and now or start
  if previous > 0 then
    return start + 2 * window - now, charged_at
  end
  current = current + cost
  return start + 2 * window - now, charged_at, start + window + (window + -window % current) / current - now
end

local function refund(key, now, at, limit, window, ttl, cost, unique, charged_at)
  local _, _, _, index, previous, current = check(key, now, at, limit, window, ttl, 0)
  local behind, units = index - math.floor(charged_at / window), 0
  if behind == 0 then
    units = math.min(cost, current)
    current = current - units
  end
  if behind == 1 or unique == "" then
    local earlier = math.min(cost - units, previous)
    previous, units = previous - earlier, units + earlier
  end
  if units > 0 then
    redis.call("SET", key, index .. ":" .. previous .. ":" .. current, "PX", ttl)
  end
  return units
end

local function reset(key)
  return redis.call("DEL", key)
end

return check, charge, refund, reset
