--[[
  Sliding window counter: the previous window's count, weighted by what of it is still in sight, and this window's.
  Version  3

  State  STRING at <key>, <index>:<previous>:<current>; expires two windows after the last charge

  Allowed iff previous * (window - elapsed) + (current + cost) * window <= limit * window. The products stay below
  2^52 (the settings see to it), where a quotient of whole numbers rounds to the right side. The three numbers stay
  below 10^14, so that `..` keeps all their digits.
]]
--# state
local index, previous, current, start, unchanged

--# read
index, previous, current = (now - now % window) / window, 0, 0
local found = call("GET", key)
if found then
  local text, stored, before, within = string.match(found, "^((%d+):(%d+):)(%d+)$")
  stored = stored + 0
  if stored >= index then
    index, previous, current, unchanged = stored, before + 0, within + 0, text -- later than now: the clock stepped back
  elseif stored == index - 1 then
    previous = within + 0
  end
end

--# check
--> read
start, count, reset_after = index * window, current, 0
if previous > 0 then
  count = count + math.ceil(previous * (window - math.max(0, now - start)) / window)
  reset_after = start + window - now
end
if current > 0 then
  reset_after = start + 2 * window - now
end

--# wait
-- What was counted before a window takes no more than `spare` units once that part of the window has passed.
if current + cost <= limit then
  local spare = limit - current - cost
  retry_after = start + window - math.floor(spare * window / previous) - now
else
  local spare = limit - cost
  retry_after = start + window + math.max(0, window - math.floor(spare * window / current)) - now
end

--# charge
call("SET", key, (unchanged or index .. ":" .. previous .. ":") .. current + cost, "PX", 2 * window)
reset_after, charged_at = start + 2 * window - now, start

--# refund
--> state
--> read
local behind, given = index - math.floor(charged_at / window), 0
if behind == 0 then
  given = math.min(cost, current)
  current = current - given
end
if behind == 1 or unique == "" then
  local earlier = math.min(cost - given, previous)
  previous, given = previous - earlier, given + earlier
end
if given > 0 then
  call("SET", key, index .. ":" .. previous .. ":" .. current, "PX", 2 * window)
end
return given
