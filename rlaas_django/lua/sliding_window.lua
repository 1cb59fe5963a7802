--[[
  Sliding window log: at most `limit` units in any `window`, exactly.
  Version  4

  State  ZSET at <key>, a member <ms>-<unique> scored <ms> per unit; expires two windows after the last request

  An entry is dead once it is a whole window old. Dead ones are passed over when counting and removed with the next
  charge, so a look or a refusal changes nothing but, as the source documents ask, a refusal's expiry.

  Each command costs more than all the Lua around it. Mostly no entry is dead and none is later than now (those are
  when the clock stepped back): then two counts tell it, and the entries themselves are looked at only for a refusal.
]]
--# state
local entries, gone, wait = 0, 0, 0

--# check
entries, reset_after = call("ZCARD", key), 0
if entries > 0 then
  local over, within = entries + cost - limit, nil
  if over > 0 and cost <= limit then
    -- It passes once so many of the oldest are dead.
    local last = over > 1 and over - 1 or "0"
    wait = call("ZRANGE", key, last, last, "WITHSCORES")[2] + window - now
  end
  if charge and wait <= 0 and cost <= limit then
    within = call("ZCOUNT", key, now - window + 1, at)
  elseif charge then
    redis.pcall("PEXPIRE", key, 2 * window) -- a server that takes no writes still refuses
  end
  -- The last of `over` is alive: if it is the oldest, none is dead.
  if within ~= entries and (wait <= 0 or over > 1) then
    gone = call("ZCOUNT", key, "-inf", now - window)
  end
  if within == entries - gone then
    reset_after = nil -- none is later than now, and a charge will be the last
  elseif entries > gone then
    reset_after = call("ZRANGE", key, "-1", "-1", "WITHSCORES")[2] + window - now
  end
end
count = entries - gone

--# wait
retry_after = wait

--# look
reset_after = count > 0 and call("ZRANGE", key, "-1", "-1", "WITHSCORES")[2] + window - now or 0

--# charge
if gone > 0 then
  call("ZREMRANGEBYSCORE", key, "-inf", now - window)
end
local member = at .. "-" .. unique
call("ZADD", key, at, member)
for from = 2, cost, 500 do -- the Lua stack takes some thousand values at once
  local more = {}
  for i = from, math.min(from + 499, cost) do
    more[#more + 1] = at
    more[#more + 1] = member .. "." .. i
  end
  call("ZADD", key, unpack(more))
end
call("PEXPIRE", key, 2 * window)
if not reset_after or reset_after < window then
  reset_after = window
end
charged_at = now

--# refund
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
