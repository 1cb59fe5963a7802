--[[
  Token bucket: `capacity` units at once, refilled at `limit` per `window`.
  Version  6

  State    STRING at <key>, <used>:<stamp>:<total><refunds>; expires a window after the bucket would be full
             used    what is missing from the full bucket at `stamp`, in 1/window of a unit, so that a ms refills
                     exactly `limit` of it
             stamp   in ms
             total   the units charged so far. It starts at 100 per ms of the clock, so that a charge to a bucket that
                     has expired is older than all charges to the next one
             refunds ;<charged_at>=<part> for each of the last 16 refunds of a charge that was not the newest; `part`
                     is in the unit of `used`

  check    key, now, at, limit, window, ttl, cost, capacity, charging
           -> count, wait, reset_after, used, stamp, total, refunds
  charge   key, now, at, limit, window, ttl, cost, unique, used, stamp, total, refunds -> reset_after, charged_at
           charged_at is no time here, but the total with this charge
  refund   key, now, at, limit, window, ttl, cost, unique, charged_at -> units taken back
  reset    key, now, window -> keys deleted

  A refill goes to the oldest charge. So of a charge, no more is refunded than would be missing without the charges
  after it: then the bucket is never fuller than it would be without the refunded charges. A refund that is not in
  `refunds` any more only makes later refunds smaller.

  Nothing is rounded: `used` is a whole number below 2^52 (the settings ensure it).
]]
local function check(key, now, at, limit, window, ttl, cost, capacity)
  local found, used, stamp, total = redis.call("GET", key), 0, now, nil
  local refunds = ""
  if found then
    used, stamp, total, refunds = string.match(found, "^(%d+):(%d+):(%d+)(.*)$")
    used, stamp, total = used + 0, stamp + 0, total + 0
    if stamp < now then -- else the clock stepped back: nothing is refilled until it is there again
      used, stamp = used - (now - stamp) * limit, now
      if used < 0 then
        used = 0
      end
    end
  end
  local refilled = -used % window -- of the unit that is being refilled
  local count, missing = (used + refilled) / window, window - refilled
  if count + cost > capacity then
    missing = used - (capacity - cost) * window
  end
  local wait = stamp - now + (missing + -missing % limit) / limit
  return count, wait, used > 0 and stamp - now + (used + -used % limit) / limit or 0, used, stamp, total, refunds
end

local function charge(key, now, at, limit, window, ttl, cost, unique, used, stamp, total, refunds)
  if used == 0 then
    refunds = "" -- every charge so far has been refilled
  end
  used, total = used + cost * window, (total or now * 100) + cost
  local full = (used + -used % limit) / limit
  local when = stamp == now and at or string.format("%.0f", stamp)
  local text = string.format("%.0f:%s:%.0f", used, when, total) -- `..` keeps 14 digits
  redis.call("SET", key, text .. refunds, "PX", full + window)
  return stamp - now + full, total
end

local function refund(key, now, at, limit, window, ttl, cost, unique, charged_at)
  local _, _, _, used, stamp, total, refunds = check(key, now, at, limit, window, ttl, 0, limit)
  if unique == "" then
    charged_at = total -- the newest units
  end
  if not total or charged_at > total then
    return 0 -- charged to a bucket that is gone
  end
  local left, kept = used - (total - charged_at) * window, {}
  for entry, later, part in string.gmatch(refunds, "(;(%d+)=(%d+))") do
    kept[#kept + 1] = entry
    if later + 0 > charged_at then
      left = left + part
    end
  end
  local part = math.min(cost * window, left, used)
  if part <= 0 then
    return 0
  end
  if charged_at < total then
    kept[#kept + 1] = string.format(";%.0f=%.0f", charged_at, part)
    refunds = table.concat(kept, "", math.max(1, #kept - 15))
  elseif unique ~= "" and part == cost * window then
    total = total - cost -- as if it had not been charged
  end
  charge(key, now, at, limit, window, ttl, 0, unique, used - part, stamp, total, refunds)
  return math.ceil(part / window) -- part of a unit may have been refilled
end

local function reset(key)
  return redis.call("DEL", key)
end

return check, charge, refund, reset
