--[[
  Fixed window: at most `limit` units between two multiples of `window`.
  Version  3

  State  STRING at <key>:<floor(now / window)>, the units charged; expires a window after its first charge
]]
--# state
local start, counter

--# check
local index = (now - now % window) / window
counter = key .. ":" .. index
local following = key .. ":" .. index + 1
local found = call("MGET", counter, following)
count = found[1]
if found[2] then
  -- The next window has begun already: the clock stepped back. To stay in that window admits nothing twice.
  index, counter, count = index + 1, following, found[2]
end
start = index * window
count = count and count + 0 or 0
reset_after = count > 0 and start + window - now or 0

--# wait
retry_after = start + window - now

--# charge
if call("INCRBY", counter, ARGV[3]) == cost then
  call("PEXPIRE", counter, ARGV[word + 2])
end
reset_after, charged_at = start + window - now, start

--# refund
if charged_at + window <= now then
  return 0 -- that window is over
end
local counter = key .. ":" .. math.floor(charged_at / window)
local given = math.min(cost, (call("GET", counter) or 0) + 0)
if given > 0 then
  call("DECRBY", counter, given)
end
return given
