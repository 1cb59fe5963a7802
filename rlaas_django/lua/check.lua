--[[
  Decides every policy of one request, all or nothing: each is checked, and all are charged only if
  every enforced one passes. A shadow policy is charged when it passes too, and never refuses.
  Version  3

  KEYS   one per policy, then for each policy its identity's overrides: a HASH, <policy, or * for all> -> <kind>:<until>:<limit>
  ARGV   now, unique (tells this request from all others), cost, charge ('1'; '0' looks and touches nothing),
         then for each policy: algorithm, limit, window in ms, capacity, shadow ('1' or '0'), name
  reply  {now, {allowed, current_count, remaining, retry_after, reset_after, limit, charged_at}, ...}
         times in ms; retry_after -1 is never; charged_at -1 is not charged

  An algorithm is a function(step, p, now, cost, touch, unique, charged_at), for p = {algorithm, key, limit, window,
  capacity}. Its file is the body, and gives by step:
    check    -> allowed, current_count, remaining, retry_after, reset_after    (charges nothing; without touch writes nothing)
    charge   -> reset_after, charged_at                                        (only after check, which leaves its reading in p)
    refund   -> units given back
    reset    -> reset_after                                                    (only where check leaves it nil, as the charge tells it)

  It is one function and not four because each is made anew whenever a script runs, at the price of a short command.
  So is each table and each text: numbers go to commands as they are, and a row of the reply is made once.
]]
local unique, cost, charge = ARGV[2], ARGV[3] + 0, ARGV[4] == "1"
local number, override = (#ARGV - 4) / 6, nil

if call("EXISTS", unpack(KEYS, number + 1)) > 0 then
  -- What an operator made hold for this identity instead: block, exempt or limit; until when; and the limit.
  override = function(key, name)
    for _, found in ipairs(call("HMGET", key, name, "*")) do
      local kind, ends, limit = string.match(found or "", "^(%a+):(%d+):(%d*)$")
      if kind and tonumber(ends) > now then
        return kind, tonumber(ends), tonumber(limit)
      end
    end
  end
end

local policies, reply, pass = {}, { now }, true
for i = 1, number do
  local at = 6 * i - 1
  local p = {
    algorithm = algorithms[ARGV[at]],
    key = KEYS[i],
    limit = ARGV[at + 1] + 0,
    window = ARGV[at + 2] + 0,
    capacity = ARGV[at + 3] + 0,
  }
  local kind, ends, limit
  if override then
    kind, ends, limit = override(KEYS[i + number] or KEYS[number + 1], ARGV[at + 5])
    if kind == "limit" then
      p.limit, p.capacity = limit, limit
    end
  end
  local allowed, count, remaining, retry_after, reset_after = p.algorithm("check", p, now, cost, charge)
  if kind == "block" then
    allowed, remaining, retry_after = false, 0, ends - now
  elseif kind == "exempt" then
    allowed, p.exempt, retry_after = true, true, 0
  end
  pass = pass and (allowed or ARGV[at + 4] == "1")
  local r = 7 * i - 5
  policies[i] = p
  reply[r], reply[r + 1], reply[r + 2], reply[r + 3] = allowed and 1 or 0, count, remaining, retry_after
  reply[r + 4], reply[r + 5], reply[r + 6] = reset_after or false, p.capacity, -1
end

for i = 1, number do
  local p, r = policies[i], 7 * i - 5
  if charge and pass and reply[r] == 1 and not p.exempt then
    reply[r + 2] = reply[r + 2] - cost
    reply[r + 4], reply[r + 6] = p.algorithm("charge", p, now, cost, true, unique)
  elseif not reply[r + 4] then
    reply[r + 4] = p.algorithm("reset", p, now)
  end
end
return reply
