--[[
  Sliding window log: at most `limit` units in any `window`, exactly.
  Version  1

  State  ZSET at <key>, a member <ms>-<unique> scored <ms> per unit; expires two windows after the last request

  An entry is dead once it is a whole window old. Dead ones are passed over when counting and removed with the next
  charge, so a look or a refusal changes nothing but, as the source documents ask, a refusal's expiry.
]]
local function members(cost, charged_at, unique)
  local stem, list = digits(charged_at) .. "-" .. unique, {}
  list[1] = stem
  for i = 2, cost do
    list[i] = stem .. "." .. i
  end
  return list
end

-- The Lua stack takes some thousand values at once.
local function in_batches(list, size, call)
  for from = 1, #list, size do
    call(unpack(list, from, math.min(from + size - 1, #list)))
  end
end

local function check(p, now, cost, touch)
  p.dead = digits(now - p.window)
  local live, reset_after = 0, 0
  p.newest = tonumber(redis.call("ZRANGE", p.key, -1, -1, "WITHSCORES")[2])
  if p.newest and p.newest > now - p.window then
    live = redis.call("ZCOUNT", p.key, "(" .. p.dead, "+inf")
    reset_after = p.newest + p.window - now
  end

  local allowed = live + cost <= p.limit
  local retry_after = 0
  if not allowed then
    if cost > p.limit then
      retry_after = -1
    else
      local nth = live + cost - p.limit - 1
      local entry = redis.call("ZRANGEBYSCORE", p.key, "(" .. p.dead, "+inf", "WITHSCORES", "LIMIT", nth, 1)
      retry_after = tonumber(entry[2]) + p.window - now
    end
    if touch then
      redis.call("PEXPIRE", p.key, digits(2 * p.window))
    end
  end
  p.left = math.max(0, p.limit - live)
  return allowed, live, p.left, retry_after, reset_after
end

local function charge(p, now, cost, unique)
  redis.call("ZREMRANGEBYSCORE", p.key, "-inf", p.dead)
  if cost == 1 then
    redis.call("ZADD", p.key, digits(now), digits(now) .. "-" .. unique)
  else
    local scored = {}
    for i, member in ipairs(members(cost, now, unique)) do
      scored[2 * i - 1], scored[2 * i] = digits(now), member
    end
    in_batches(scored, 1000, function(...) redis.call("ZADD", p.key, ...) end)
  end
  redis.call("PEXPIRE", p.key, digits(2 * p.window))
  return p.left - cost, math.max(p.newest or 0, now) + p.window - now, now
end

local function refund(p, now, cost, charged_at, unique)
  local given = 0
  if charged_at + p.window <= now then
    return given -- dead, and not counted any more
  end
  if unique == "" then
    given = math.min(cost, redis.call("ZCOUNT", p.key, "(" .. digits(now - p.window), "+inf"))
    if given > 0 then
      redis.call("ZPOPMAX", p.key, digits(given))
    end
    return given
  end
  in_batches(members(cost, charged_at, unique), 1000, function(...)
    given = given + redis.call("ZREM", p.key, ...)
  end)
  return given
end

return { check = check, charge = charge, refund = refund }
