--[[
  The driver: runs one operation on the policies of a request, with the functions of their algorithms.
  Version  7

  check    Checks every policy, then charges all of them, only if every enforced one passes. A shadow policy is charged
           when it passes too, and never refuses.
  peek     The same, but charges nothing and writes nothing.
    KEYS   a counter key per policy, then the override key of the identity that all policies count, or one per policy:
           a HASH, <policy, or * for all> -> <kind>:<until>:<amount>; kind is block, exempt, limit (amount: units) or
           factor (amount: thousandths of the policy's own limit)
    ARGV   now, 'check' or 'peek', unique (tells this request from all others), cost,
           then per policy: algorithm, limit, window, capacity, ttl, shadow ('1' or '0'), name;
           then, where overrides of networks apply to the client, one text with theirs: per policy some of
           <kind>:<until>:<amount>; and then a comma, the widest network first
    reply  {now, then per policy: allowed, current_count, remaining, retry_after, reset_after, limit, charged_at}
           retry_after -1: never; where the policy allows, the time until more than `remaining` can be used, unless
           reset_after is sooner, and -1: not known. charged_at -1: not charged, -2: refused by a block. Where an
           override changes the limit of a token bucket with a burst, the limits per policy follow: `limit` above is
           the burst then.

  Of the overrides that apply to a policy, each narrower one replaces the wider ones: a smaller network a larger one, one
  of the identity that of a network, one of the policy that of all policies. But a limit or factor never lifts a block.

  refund   Takes back what a check charged, never more than is still counted, and nothing from before a reset.
    KEYS   a counter key per charged policy; then, for a refund that may be asked for twice, the key of a marker, which
           says that it was done
    ARGV   now, 'refund', unique of the check ('': no check in particular, the newest units), cost,
           then per policy: algorithm, limit, window, capacity, ttl, charged_at; then the ttl of the marker
    reply  {units taken back, ...}; {} where the marker was there

  reset    Deletes the state of counters.
    KEYS   the counter keys
    ARGV   now, 'reset', '1' or '0', '0', then per key: algorithm, window
           '1' leaves the time of the reset at <key>:reset, for two windows, where there was a counter
    reply  the number of counters that were there

  Times are in ms. `now` is '' for the server's clock, which is read once; ttl is the expiry of a counter.

  scripts.py puts `load_algorithm(name)` before this text. It returns four functions, check, charge, refund and reset,
  which the algorithm's file describes; as values, since a table of them costs 2,000 instructions of 90,000 per check.

  To turn a number into text costs up to 5,000 instructions. So what comes as text and goes to a command as text stays
  text: `at`, beside the number `now`, and ttl.
]]
local ARGV, KEYS, at, operation = ARGV, KEYS, ARGV[1], ARGV[2]
if at == "" then
  local time = redis.call("TIME") -- seconds, and µs without leading zeros
  local us = #time[2] == 6 and time[2] or string.sub("00000" .. time[2], -6)
  at = time[1] .. string.sub(us, 1, 3)
end
local now, unique, cost = at + 0, ARGV[3], ARGV[4] == "1" and 1 or ARGV[4] + 0

if operation == "refund" then
  local refunded, policies = {}, math.floor((#ARGV - 4) / 6)
  if KEYS[policies + 1] and not redis.call("SET", KEYS[policies + 1], "1", "NX", "PX", ARGV[#ARGV]) then
    return refunded
  end
  for i = 1, policies do
    local key, word = KEYS[i], 6 * i - 1
    local limit, window, ttl = ARGV[word + 1] + 0, ARGV[word + 2] + 0, ARGV[word + 4]
    local charged_at = unique == "" and now or ARGV[word + 5] + 0
    local _, _, refund = load_algorithm(ARGV[word])
    -- By pcall: a node whose slot is on its way has an error for a key that is not there.
    local reset_at = unique ~= "" and tonumber(redis.pcall("GET", key .. ":reset")) or 0
    refunded[i] = charged_at < reset_at and 0
      or refund(key, now, at, limit, window, ttl, cost, unique, charged_at)
  end
  return refunded
elseif operation == "reset" then
  local deleted = 0
  for i, key in ipairs(KEYS) do
    local word = 2 * i + 3
    local _, _, _, reset = load_algorithm(ARGV[word])
    local window = ARGV[word + 1] + 0
    local found = reset(key, now, window)
    if found > 0 and unique == "1" then
      redis.pcall("SET", key .. ":reset", at, "PX", 2 * window)
    end
    deleted = deleted + found
  end
  return deleted
end

local policies, charging, pass = (#ARGV - 4) / 7, operation == "check" and cost > 0, true
local networks
if policies % 1 > 0 then
  policies, networks = math.floor(policies), {}
  for list in string.gmatch(ARGV[#ARGV], "([^,]*),") do
    networks[#networks + 1] = list
  end
end

local find_override, scale, limits
if networks or redis.call("EXISTS", KEYS[policies + 1]) > 0
  or KEYS[policies + 2] and redis.call("EXISTS", unpack(KEYS, policies + 2)) > 0 then
  -- Returns the kind, the end and the amount of the override that applies to a policy now.
  find_override = function(i, key, name)
    local kind, ends, amount
    local function apply(found)
      local narrower, till, number = string.match(found or "", "^(%a+):(%d+):(%d*)$")
      if narrower and till + 0 > now
        and not (kind == "block" and (narrower == "limit" or narrower == "factor")) then
        kind, ends, amount = narrower, till + 0, tonumber(number)
      end
    end
    for found in string.gmatch(networks and networks[i] or "", "[^;]+") do
      apply(found)
    end
    local found = redis.call("HMGET", key, "*", name)
    apply(found[1])
    apply(found[2])
    return kind, ends, amount
  end
  -- Returns an amount times a factor in thousandths, rounded down, without a product beyond 2^53.
  scale = function(amount, factor)
    local rest = amount % 1000
    return math.max(1, (amount - rest) / 1000 * factor + math.floor(rest * factor / 1000))
  end
end

-- Room for one policy, or for three, from the start: a table that grows is copied each time.
local reply = policies == 1 and { now, nil, nil, nil, nil, nil, nil, nil }
  or { now, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
    nil, nil, nil, nil, nil, nil, nil, nil, nil, nil }

-- Check. What a charge needs is in these locals, and for all policies but the last in `kept`: a request with one
-- policy, as most are, makes no table for it.
local loaded, check_of, charge_of, kept, charge, limit, window, a, b, c, d, e
for i = 1, policies do
  local word, row = 7 * i - 2, 7 * i - 5
  if i > 1 then
    local slot = 8 * i - 15
    kept = kept or { nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil }
    kept[slot], kept[slot + 1], kept[slot + 2] = charge, limit, window
    kept[slot + 3], kept[slot + 4], kept[slot + 5], kept[slot + 6], kept[slot + 7] = a, b, c, d, e
  end

  limit, window = ARGV[word + 1] + 0, ARGV[word + 2] + 0
  local capacity = ARGV[word + 3] == ARGV[word + 1] and limit or ARGV[word + 3] + 0
  local kind, ends, custom
  if find_override then
    kind, ends, custom = find_override(i, KEYS[policies + i] or KEYS[policies + 1], ARGV[word + 6])
    if kind == "limit" or kind == "factor" then
      limits = limits or limit ~= capacity
      local most = math.floor(2 ^ 52 / window) -- that is counted exactly
      limit = math.min(most, kind == "limit" and custom or scale(limit, custom))
      capacity = kind == "limit" and limit or math.min(most, scale(capacity, custom))
    end
  end

  if ARGV[word] ~= loaded then
    loaded = ARGV[word]
    check_of, charge_of = load_algorithm(loaded)
  end
  local count, wait, reset_after
  count, wait, reset_after, a, b, c, d, e =
    check_of(KEYS[i], now, at, limit, window, ARGV[word + 4], cost, capacity, charging)

  local remaining, retry_after, charged_at = capacity - count, wait, -1
  local allowed = cost <= remaining
  if not allowed then
    if cost > capacity then
      retry_after = -1
    end
    if remaining < 0 then
      remaining = 0
    end
  end
  if kind == "block" then
    -- The counter's own wait, where it is the longer one; -1, never, stays.
    local left = ends - now
    if allowed or retry_after >= 0 and retry_after < left then
      retry_after = left
    end
    allowed, remaining, charged_at = false, 0, -2
    reset_after = retry_after < left and left or retry_after
  elseif kind == "exempt" then
    allowed = true
  end

  pass = pass and (allowed or ARGV[word + 5] == "1")
  charge = allowed and kind ~= "exempt" and charge_of
  reply[row], reply[row + 1], reply[row + 2], reply[row + 3] = allowed and 1 or 0, count, remaining, retry_after
  reply[row + 4], reply[row + 5], reply[row + 6] = reset_after, capacity, charged_at
end

-- Charge, from the last policy to the first.
for i = policies, 1, -1 do
  local word, row = 7 * i - 2, 7 * i - 5
  if i < policies then
    charge, limit, window, a, b, c, d, e = unpack(kept, 8 * i - 7, 8 * i)
  end
  if limits then
    reply[7 * policies + 1 + i] = limit
  end
  if charge and pass and charging then
    reply[row + 2] = reply[row + 2] - cost
    local reset_after, charged_at, more_after =
      charge(KEYS[i], now, at, limit, window, ARGV[word + 4], cost, unique, a, b, c, d, e)
    reply[row + 4], reply[row + 6] = reset_after, charged_at
    if more_after then
      reply[row + 3] = more_after
    end
  elseif not reply[row + 4] then
    -- The check left reset_after to a charge that does not take place. A charge of 0 only returns it.
    if ARGV[word] ~= loaded then
      loaded = ARGV[word]
      check_of, charge_of = load_algorithm(loaded)
    end
    reply[row + 4] = charge_of(KEYS[i], now, at, limit, window, ARGV[word + 4], 0, unique)
  end
end
return reply
