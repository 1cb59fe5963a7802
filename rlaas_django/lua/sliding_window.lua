--[[
  Sliding window log: at most `limit` units in any `window`, exactly.
  Version  6

  State    ZSET at <key>, a member <ms>-<unique> scored <ms> per unit; expires two windows after the last request

  check    key, now, at, limit, window, ttl, cost, capacity, charging -> count, wait, reset_after, dead, later
           wait is -1 where the cost fits: to read the oldest entry costs 12,000 instructions.
           reset_after is nil when a charge is sure to make it the window: to read it costs as much.
           If nothing is charged after all, a charge of 0 reads it and does nothing else
  charge   key, now, at, limit, window, ttl, cost, unique, dead, later -> reset_after, charged_at
  refund   key, now, at, limit, window, ttl, cost, unique, charged_at -> units taken back
  reset    key, now, window -> keys deleted

  An entry is dead once it is a whole window old. Dead entries are not counted, and are removed by the next charge. So a
  peek changes nothing, and a refusal nothing but, as the source documents ask, the expiry.

  A command costs more than all the Lua around it. Mostly no entry is dead and none is later than now (entries are
  later when the clock stepped back): then two counts tell it, and entries are read only for a refusal.
]]
local function check(key, now, at, limit, window, ttl, cost, capacity, charging)
  local entries = redis.call("ZCARD", key)
  if entries == 0 then
    return 0, -1, 0, 0
  end
  local over, wait, dead, within, reset_after = entries + cost - limit, 0, 0, nil, 0
  if over > 0 and cost <= limit then
    -- It passes once so many of the oldest are dead.
    local last = over > 1 and over - 1 or "0"
    wait = string.match(redis.call("ZRANGE", key, last, last)[1], "^%d+") + window - now
  end
  if charging and wait <= 0 and cost <= limit then
    within = redis.call("ZCOUNT", key, now - window + 1, at)
  elseif charging then
    redis.pcall("PEXPIRE", key, ttl) -- a server that takes no writes still refuses
  end
  -- The last of `over` is alive: if it is the oldest, none is dead.
  if within ~= entries and (wait <= 0 or over > 1) then
    dead = redis.call("ZCOUNT", key, "-inf", now - window)
  end
  if within == entries - dead then
    reset_after = nil -- none is later than now, and a charge will be the last
  elseif entries > dead then
    reset_after = string.match(redis.call("ZRANGE", key, "-1", "-1")[1], "^%d+") + window - now
  end
  return entries - dead, wait > 0 and wait or -1, reset_after, dead, reset_after
end

-- The members of a charge's second and further units; calls a command with 500 at a time, as the Lua stack takes some
-- thousand values at once. `score` is nil for a command that takes none. Returns the sum of the replies.
local function for_more_units(command, key, score, member, cost)
  local sum = 0
  for from = 2, cost, 500 do
    local words = {}
    for i = from, math.min(from + 499, cost) do
      words[#words + 1] = score
      words[#words + 1] = member .. "." .. i
    end
    sum = sum + redis.call(command, key, unpack(words))
  end
  return sum
end

local function charge(key, now, at, limit, window, ttl, cost, unique, dead, later)
  if cost == 0 then
    local left = string.match(redis.call("ZRANGE", key, "-1", "-1")[1], "^%d+") + window - now
    return left > 0 and left or 0
  end
  if dead > 0 then
    redis.call("ZREMRANGEBYSCORE", key, "-inf", now - window)
  end
  local member = at .. "-" .. unique
  redis.call("ZADD", key, at, member)
  if cost > 1 then
    for_more_units("ZADD", key, at, member, cost)
  end
  redis.call("PEXPIRE", key, ttl)
  return later and later > window and later or window, now
end

local function refund(key, now, at, limit, window, ttl, cost, unique, charged_at)
  if charged_at <= now - window then
    return 0 -- dead, and not counted any more
  elseif unique == "" then
    local units = math.min(cost, redis.call("ZCOUNT", key, now - window + 1, "+inf"))
    if units > 0 then
      redis.call("ZPOPMAX", key, units)
    end
    return units
  end
  local member = charged_at .. "-" .. unique
  return redis.call("ZREM", key, member) + for_more_units("ZREM", key, nil, member, cost)
end

local function reset(key)
  return redis.call("DEL", key)
end

return check, charge, refund, reset
