--[[
  Fixed window: at most `limit` units between two multiples of `window`.
  Version  2

  State  STRING at <key>:<floor(now / window)>, the units charged; expires a window after its first charge
]]
local key, limit, window = p.key, p.limit, p.window

if step == "check" then
  local index = math.floor(now / window)
  local this, next = key .. ":" .. index, key .. ":" .. index + 1
  local found = call("MGET", this, next)
  local count = found[1] or 0
  if found[2] then
    -- The next window has begun already: the clock stepped back. To stay in that window admits nothing twice.
    index, this, count = index + 1, next, found[2]
  end
  p.start, p.counter = index * window, this

  count = count + 0
  local left, remaining = p.start + window - now, limit - count
  local reset_after = count > 0 and left or 0
  if cost <= remaining then
    return true, count, remaining, 0, reset_after
  end
  return false, count, math.max(0, remaining), cost > limit and -1 or left, reset_after
end

if step == "charge" then
  if call("INCRBY", p.counter, cost) == cost then
    call("PEXPIRE", p.counter, window)
  end
  return p.start + window - now, p.start
end

if charged_at + window <= now then
  return 0 -- that window is over
end
local counter = key .. ":" .. math.floor(charged_at / window)
local given = math.min(cost, (call("GET", counter) or 0) + 0)
if given > 0 then
  call("DECRBY", counter, given)
end
return given
