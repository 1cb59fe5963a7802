--[[
  Fixed window: at most `limit` units between two multiples of `window`.
  Version  5

  State    STRING at <key>:<floor(now / window)>, the units charged; expires a window after its first charge

  check    key, now, at, limit, window, ttl, cost, capacity, charging -> count, wait, reset_after, counter, start
  charge   key, now, at, limit, window, ttl, cost, unique, counter, start -> reset_after, charged_at
  refund   key, now, at, limit, window, ttl, cost, unique, charged_at -> units taken back
  reset    key, now, window -> keys deleted
]]
local function check(key, now, at, limit, window, ttl, cost)
  local index = (now - now % window) / window
  local counter, following = key .. ":" .. index, key .. ":" .. index + 1
  local found = redis.call("MGET", counter, following)
  local count = found[1]
  if found[2] then
    -- The next window has begun already: the clock stepped back. To stay in that window admits nothing twice.
    index, counter, count = index + 1, following, found[2]
  end
  count = count and count + 0 or 0
  local start = index * window
  local left = start + window - now
  return count, left, count > 0 and left or 0, counter, start
end

local function charge(key, now, at, limit, window, ttl, cost, unique, counter, start)
  local count = cost == 1 and redis.call("INCR", counter) or redis.call("INCRBY", counter, cost)
  if count == cost then
    redis.call("PEXPIRE", counter, ttl)
  end
  return start + window - now, start < now and now or start
end

local function refund(key, now, at, limit, window, ttl, cost, unique, charged_at)
  local index = math.floor(charged_at / window)
  if (index + 1) * window <= now then
    return 0 -- that window is over
  end
  local counter = key .. ":" .. index
  local units = math.min(cost, (redis.call("GET", counter) or 0) + 0)
  if units > 0 then
    redis.call("DECRBY", counter, units)
  end
  return units
end

-- Only the server's clock tells the window's index. A neighbouring window is there when the clock stepped.
local function reset(key, now, window)
  local index = math.floor(now / window)
  return redis.call("DEL", key .. ":" .. index - 1, key .. ":" .. index, key .. ":" .. index + 1)
end

return check, charge, refund, reset
