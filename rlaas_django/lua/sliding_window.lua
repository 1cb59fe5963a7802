--[[
  Sliding window log: at most `limit` units in any `window`, exactly.
  Version  3

  State  ZSET at <key>, a member <ms>-<unique> scored <ms> per unit; expires two windows after the last request

  An entry is dead once it is a whole window old. Dead ones are passed over when counting and removed with the next
  charge, so a look or a refusal changes nothing but, as the source documents ask, a refusal's expiry.

  Each command costs more than all the Lua around it. Mostly no entry is dead and none is later than now (those are
  when the clock stepped back): then two counts tell it, and the entries themselves are looked at only for a refusal.
]]
local key, limit, window = p.key, p.limit, p.window

if step == "check" then
  local entries, gone = call("ZCARD", key), 0
  local over, retry_after = entries + cost - limit, 0
  if cost > limit then
    retry_after = -1
  elseif over > 0 then
    -- It passes once so many of the oldest are dead.
    retry_after = math.max(0, call("ZRANGE", key, over - 1, over - 1, "WITHSCORES")[2] + window - now)
  end
  local allowed = retry_after == 0
  if entries == 0 then
    p.live, p.gone, p.reset_after = 0, 0, 0
    return allowed, 0, limit, retry_after, 0
  end

  local within
  if allowed and touch then
    within = call("ZCOUNT", key, now - window + 1, now)
  end
  -- The last of `over` is alive: if it is the oldest, none is dead.
  if within ~= entries and (allowed or over ~= 1) then
    gone = call("ZCOUNT", key, "-inf", now - window)
  end
  if touch and not allowed then
    redis.pcall("PEXPIRE", key, 2 * window) -- a server that takes no writes still refuses
  end
  p.live, p.gone = entries - gone, gone
  if within ~= p.live then -- some are later, or a charge will not tell it
    p.reset_after = p.algorithm("reset", p, now)
  end
  return allowed, p.live, math.max(0, limit - p.live), retry_after, p.reset_after
end

if step == "reset" then
  return p.live > 0 and call("ZRANGE", key, -1, -1, "WITHSCORES")[2] + window - now or 0
end

if step == "charge" then
  if p.gone > 0 then
    call("ZREMRANGEBYSCORE", key, "-inf", now - window)
  end
  local member = now .. "-" .. unique
  call("ZADD", key, now, member)
  for from = 2, cost, 500 do -- the Lua stack takes some thousand values at once
    local more = {}
    for i = from, math.min(from + 499, cost) do
      more[#more + 1] = now
      more[#more + 1] = member .. "." .. i
    end
    call("ZADD", key, unpack(more))
  end
  call("PEXPIRE", key, 2 * window)
  return math.max(p.reset_after or 0, window), now
end

if charged_at <= now - window then
  return 0 -- dead, and not counted any more
elseif unique == "" then
  local given = math.min(cost, call("ZCOUNT", key, now - window + 1, "+inf"))
  if given > 0 then
    call("ZPOPMAX", key, given)
  end
  return given
end
local member = charged_at .. "-" .. unique
local given = call("ZREM", key, member)
for from = 2, cost, 500 do
  local more = {}
  for i = from, math.min(from + 499, cost) do
    more[#more + 1] = member .. "." .. i
  end
  given = given + call("ZREM", key, unpack(more))
end
return given
