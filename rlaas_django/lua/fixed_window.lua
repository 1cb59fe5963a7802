--[[
  Fixed window: at most `limit` units between two multiples of `window`.
  Version  1

  State  STRING at <key>:<floor(now / window)>, the units charged; expires a window after its first charge
]]
local function key_of(p, index)
  return p.key .. ":" .. digits(index)
end

local function check(p, now, cost)
  local index = math.floor(now / p.window)
  local found = redis.call("MGET", key_of(p, index), key_of(p, index + 1))
  -- The next window has begun already: the clock stepped back. To stay in that window admits nothing twice.
  p.index = found[2] and index + 1 or index
  local count = tonumber(found[2] or found[1] or 0)
  local left = (p.index + 1) * p.window - now

  local allowed = count + cost <= p.limit
  local retry_after = 0
  if not allowed then
    retry_after = cost > p.limit and -1 or left
  end
  return allowed, count, math.max(0, p.limit - count), retry_after, count > 0 and left or 0
end

local function charge(p, now, cost)
  local key = key_of(p, p.index)
  local count = redis.call("INCRBY", key, digits(cost))
  if count == cost then
    redis.call("PEXPIRE", key, digits(p.window))
  end
  return p.limit - count, (p.index + 1) * p.window - now, p.index * p.window
end

local function refund(p, now, cost, charged_at)
  if charged_at + p.window <= now then
    return 0 -- that window is over
  end
  local key = key_of(p, math.floor(charged_at / p.window))
  local given = math.min(cost, tonumber(redis.call("GET", key) or 0))
  if given > 0 then
    redis.call("DECRBY", key, digits(given))
  end
  return given
end

return { check = check, charge = charge, refund = refund }
