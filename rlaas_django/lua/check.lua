--[[
  Decides every policy of one request, all or nothing: each is checked, and all are charged only if
  every enforced one passes. A shadow policy is charged when it passes too, and never refuses.
  Version  1

  KEYS   one per policy, then for each policy its identity's overrides: a HASH, <policy, or * for all> -> <kind>:<until>:<limit>
  ARGV   now, unique (tells this request from all others), cost, charge ('1'; '0' looks and touches nothing),
         then for each policy: algorithm, limit, window in ms, capacity, shadow ('1' or '0'), name
  reply  {now, {allowed, current_count, remaining, retry_after, reset_after, limit, charged_at}, ...}
         times in ms; retry_after -1 is never; charged_at -1 is not charged

  An algorithm gives, for p = {key, limit, window, capacity}:
    check(p, now, cost, touch)     -> allowed, current_count, remaining, retry_after, reset_after (nothing is charged)
    charge(p, now, cost, unique)   -> remaining, reset_after, charged_at            (only after check, which may leave its reading in p)
    refund(p, now, cost, charged_at, unique) -> units given back
]]
local unique, cost, charge = ARGV[2], tonumber(ARGV[3]), ARGV[4] == "1"
local policies, pass = {}, true

-- What an operator made hold for this identity instead: block, exempt or limit; until when; and the limit.
local function override(key, name)
  for _, found in ipairs(redis.call("HMGET", key, name, "*")) do
    local kind, ends, limit = string.match(found or "", "^(%a+):(%d+):(%d*)$")
    if kind and tonumber(ends) > now then
      return kind, tonumber(ends), tonumber(limit)
    end
  end
end

for i = 1, #KEYS / 2 do
  local at = 6 * i - 1
  local p = {
    key = KEYS[i],
    algorithm = algorithms[ARGV[at]],
    limit = tonumber(ARGV[at + 1]),
    window = tonumber(ARGV[at + 2]),
    capacity = tonumber(ARGV[at + 3]),
  }
  local kind, ends, limit = override(KEYS[i + #KEYS / 2], ARGV[at + 5])
  if kind == "limit" then
    p.limit, p.capacity = limit, limit
  end
  p.allowed, p.count, p.remaining, p.retry_after, p.reset_after = p.algorithm.check(p, now, cost, charge)
  if kind == "block" then
    p.allowed, p.remaining, p.retry_after = false, 0, ends - now
  elseif kind == "exempt" then
    p.allowed, p.exempt, p.retry_after = true, true, 0
  end
  pass = pass and (p.allowed or ARGV[at + 4] == "1")
  policies[i] = p
end

local reply = { now }
for i, p in ipairs(policies) do
  local charged_at = -1
  if charge and pass and p.allowed and not p.exempt then
    p.remaining, p.reset_after, charged_at = p.algorithm.charge(p, now, cost, unique)
  end
  reply[i + 1] = { p.allowed and 1 or 0, p.count, p.remaining, p.retry_after, p.reset_after, p.capacity, charged_at }
end
return reply
